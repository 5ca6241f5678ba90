// XLA FFI handlers: they check the call, cut it into units and share those among XLA's threads.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

#ifndef SOURCE_HASH
#define SOURCE_HASH "unknown"
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace ffi = xla::ffi;

namespace cpu_kernels {
namespace {

int supported_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return 0;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512cd")))
    return 1;
  return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
#else
  return 0;
#endif
}

// The kernels of the wanted level (-1: the best), or of the best below it that this CPU has.
const Kernels& kernels_of(int wanted) {
  static const int supported = supported_level();
  switch (wanted < 0 ? supported : std::min(wanted, supported)) {
#if defined(__x86_64__)
    case 3: return isa_avx512bf16::kernels();
    case 2: return isa_avx512::kernels();
    case 1: return isa_avx2::kernels();
#endif
    default: return isa_base::kernels();
  }
}

ffi::Error invalid(const std::string& message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "cpu kernels: " + message);
}

bool float_dtype(ffi::DataType type, Dtype& out) {
  switch (type) {
    case ffi::DataType::F32: out = F32; return true;
    case ffi::DataType::BF16: out = BF16; return true;
    case ffi::DataType::F16: out = F16; return true;
    default: return false;
  }
}

size_t bytes_of(Dtype type) { return type == F32 ? 4 : type == BF16 || type == F16 ? 2 : 1; }

// The attributes that both attention handlers carry.
struct Options {
  float scale, soft_cap;
  int32_t window, kv_dtype, has_sinks, has_k_scale, has_v_scale, return_lse, isa;
};

// Fills what the shapes say and checks the ids that the kernels will follow into the pool.
std::string prepare(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k_pool,
                    const ffi::AnyBuffer& v_pool, const ffi::Buffer<ffi::S32>& tables,
                    const ffi::Buffer<ffi::S32>& contexts, const ffi::Buffer<ffi::S32>& starts,
                    const ffi::Buffer<ffi::F32>& sinks, const ffi::Buffer<ffi::F32>& k_scale,
                    const ffi::Buffer<ffi::F32>& v_scale, const Options& options,
                    AttentionArgs& a) {
  auto qd = q.dimensions(), pd = k_pool.dimensions(), td = tables.dimensions();
  if (qd.size() != 3 || pd.size() != 4 || td.size() != 2) return "wrong number of dimensions";
  if (!float_dtype(q.element_type(), a.q_dtype)) return "q must be f32, bf16 or f16";
  a.q = q.untyped_data();
  a.block_tables = tables.typed_data();
  a.context_lens = contexts.typed_data();
  a.query_starts = starts.typed_data();
  a.heads = (int)qd[1];
  a.head_dim = (int)qd[2];
  a.kv_heads = (int)pd[1];
  a.block_size = (int)pd[2];
  a.table_width = (int)td[1];
  a.window = options.window;
  a.scale = options.scale;
  a.soft_cap = options.soft_cap;
  a.kv_dtype = (Dtype)options.kv_dtype;
  if (a.head_dim != pd[3] || v_pool.element_count() != k_pool.element_count() || a.heads % a.kv_heads ||
      (int64_t)contexts.element_count() != td[0] || (int64_t)starts.element_count() != td[0] + 1)
    return "shapes do not fit together";
  if (a.head_dim % 16 || a.head_dim < 16 || a.head_dim > kMaxHeadDim)
    return "head_dim " + std::to_string(a.head_dim) + " is not a multiple of 16 up to " +
           std::to_string(kMaxHeadDim);
  if (options.kv_dtype < 0 || options.kv_dtype > I8 ||
      k_pool.size_bytes() != k_pool.element_count() * bytes_of(a.kv_dtype))
    return "the pool does not hold kv_dtype";
  if (options.has_sinks) {
    if ((int)sinks.element_count() != a.heads) return "sinks must be [H]";
    a.sinks = sinks.typed_data();
  }
  if (options.has_k_scale) {
    if ((int)k_scale.element_count() != a.kv_heads) return "k_scale must be [K]";
    a.k_scale = k_scale.typed_data();
  }
  if (options.has_v_scale) {
    if ((int)v_scale.element_count() != a.kv_heads) return "v_scale must be [K]";
    a.v_scale = v_scale.typed_data();
  }
  const int32_t* starts_data = a.query_starts;
  if (starts_data[0] != 0 || starts_data[td[0]] > qd[0])
    return "query_starts run from " + std::to_string(starts_data[0]) + " to " +
           std::to_string(starts_data[td[0]]) + ", but there are " + std::to_string(qd[0]) +
           " query rows";
  for (int64_t r = 0; r < td[0]; r++) {
    const int context = a.context_lens[r], queries = starts_data[r + 1] - starts_data[r];
    auto of_request = [r] { return " of request " + std::to_string(r); };
    if (queries < 0) return "query_starts fall at the end" + of_request();
    if (context < 0 || context > (int64_t)a.table_width * a.block_size)
      return "context_len " + std::to_string(context) + of_request() + " does not fit its table of " +
             std::to_string(a.table_width) + " blocks";
    if (queries > context)
      return std::to_string(queries) + " query rows" + of_request() + " exceed its context of " +
             std::to_string(context);
    if (queries == 0) continue;
    const int from = a.window > 0 ? std::max(0, context - queries - a.window + 1) : 0;
    for (int b = from / a.block_size; b <= (context - 1) / a.block_size; b++) {
      const int32_t id = a.block_tables[r * a.table_width + b];
      if (id < 0 || id >= pd[0])
        return "block id " + std::to_string(id) + of_request() + " is outside the pool of " +
               std::to_string(pd[0]) + " blocks";
    }
  }
  return "";
}

// Units of one split each, whose last one to finish merges them all.
struct Parts {
  AttentionUnit whole;
  int count;
  std::atomic<int> left;
  std::vector<float> results;
  Parts(const AttentionUnit& unit, int count, size_t floats)
      : whole(unit), count(count), left(count), results(floats) {}
};
struct Task {
  AttentionUnit unit;
  Parts* parts;
  int64_t cost;
};

void run_attention(ffi::ThreadPool& pool, const Kernels& kernels, const AttentionArgs& a,
                   int requests) {
  const int group = a.heads / a.kv_heads;
  const int tile = group > kTileRows ? kTileRows : kTileRows / group * group;
  std::vector<Task> tasks;
  int64_t total = 0, longest = 0;
  for (int r = 0; r < requests; r++) {
    const int queries = a.query_starts[r + 1] - a.query_starts[r], rows = queries * group;
    const int position0 = a.context_lens[r] - queries;
    for (int row0 = 0; row0 < rows; row0 += tile) {
      const int count = std::min(tile, rows - row0);
      const int first = position0 + row0 / group, last = position0 + (row0 + count - 1) / group;
      const int from = a.window > 0 ? std::max(0, first - a.window + 1) : 0;
      const int64_t cost = (int64_t)(last + 1 - from) * (count + 2);
      for (int head = 0; head < a.kv_heads; head++)
        tasks.push_back({{r, head, row0, count, from / kSplitTokens, last / kSplitTokens + 1,
                          nullptr}, nullptr, cost});
      total += cost * a.kv_heads;
      longest = std::max(longest, cost);
    }
  }
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  // Where whole units would leave threads idle at the end, long ones go by splits. Both ways give
  // the same bits.
  std::deque<Parts> parts;
  if (threads > 1 && longest * threads * 2 > total) {
    std::vector<Task> pieces;
    for (const Task& task : tasks) {
      const int splits = task.unit.split1 - task.unit.split0;
      if (splits < 2 || task.cost * threads * 4 < total) {
        pieces.push_back(task);
        continue;
      }
      const size_t floats = (size_t)task.unit.rows * (a.head_dim + 2);
      parts.emplace_back(task.unit, splits, floats * splits);
      for (int s = 0; s < splits; s++) {
        Task piece{task.unit, &parts.back(), task.cost / splits};
        piece.unit.split0 = task.unit.split0 + s;
        piece.unit.split1 = piece.unit.split0 + 1;
        piece.unit.partial = parts.back().results.data() + floats * s;
        pieces.push_back(piece);
      }
    }
    tasks.swap(pieces);
  }
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const Task& x, const Task& y) { return x.cost > y.cost; });
  const int64_t floats = kernels.attention_scratch(a);
  parallel_for(pool, (int64_t)tasks.size(), [&](int64_t i) {
    float* scratch = thread_scratch(floats);
    const Task& task = tasks[i];
    kernels.attend(a, task.unit, scratch);
    if (task.parts && task.parts->left.fetch_sub(1, std::memory_order_acq_rel) == 1)
      kernels.merge(a, task.parts->whole, task.parts->results.data(), task.parts->count, scratch);
  });
}

// Outputs of rows that belong to no request.
void clear_padding(const AttentionArgs& a, int requests, int64_t rows) {
  const int64_t live = a.query_starts[requests];
  const size_t row = (size_t)a.heads * a.head_dim * bytes_of(a.q_dtype);
  std::memset((char*)a.out + live * row, 0, (rows - live) * row);
  if (a.lse) std::fill(a.lse + live * a.heads, a.lse + rows * a.heads, -INFINITY);
}

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k_pool,
                     ffi::AnyBuffer v_pool, ffi::Buffer<ffi::S32> tables,
                     ffi::Buffer<ffi::S32> contexts, ffi::Buffer<ffi::S32> starts,
                     ffi::Buffer<ffi::F32> sinks, ffi::Buffer<ffi::F32> k_scale,
                     ffi::Buffer<ffi::F32> v_scale, ffi::Result<ffi::AnyBuffer> out,
                     ffi::Result<ffi::Buffer<ffi::F32>> lse, Options options) {
  AttentionArgs a{};
  std::string wrong = prepare(q, k_pool, v_pool, tables, contexts, starts, sinks, k_scale, v_scale,
                              options, a);
  if (!wrong.empty()) return invalid(wrong);
  a.k_pool = k_pool.untyped_data();
  a.v_pool = v_pool.untyped_data();
  a.out = out->untyped_data();
  a.lse = options.return_lse ? lse->typed_data() : nullptr;
  const int requests = (int)contexts.element_count();
  run_attention(pool, kernels_of(options.isa), a, requests);
  clear_padding(a, requests, q.dimensions()[0]);
  return ffi::Error::Success();
}

ffi::Error write_and_attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                            ffi::AnyBuffer v, ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool,
                            ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> contexts,
                            ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> slots,
                            ffi::Buffer<ffi::F32> sinks, ffi::Buffer<ffi::F32> k_scale,
                            ffi::Buffer<ffi::F32> v_scale, ffi::Result<ffi::AnyBuffer> out,
                            ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out,
                            ffi::Result<ffi::Buffer<ffi::F32>> lse, Options options) {
  AttentionArgs a{};
  std::string wrong = prepare(q, k_pool, v_pool, tables, contexts, starts, sinks, k_scale, v_scale,
                              options, a);
  if (!wrong.empty()) return invalid(wrong);
  if (k_out->untyped_data() != k_pool.untyped_data() ||
      v_out->untyped_data() != v_pool.untyped_data())
    return ffi::Error(ffi::ErrorCode::kInternal, "cpu kernels: XLA did not alias the KV pool");
  a.k_pool = k_out->untyped_data();
  a.v_pool = v_out->untyped_data();
  a.out = out->untyped_data();
  a.lse = options.return_lse ? lse->typed_data() : nullptr;
  Dtype k_dtype, v_dtype;
  if (!float_dtype(k.element_type(), k_dtype) || !float_dtype(v.element_type(), v_dtype))
    return invalid("k and v must be f32, bf16 or f16");
  const int64_t tokens = q.dimensions()[0], blocks = k_pool.dimensions()[0];
  const int64_t row = (int64_t)a.kv_heads * a.head_dim;
  if ((int64_t)k.element_count() != tokens * row || (int64_t)v.element_count() != tokens * row ||
      (int64_t)slots.element_count() != tokens)
    return invalid("k, v and slots do not fit q");
  const int32_t* slot = slots.typed_data();
  for (int64_t t = 0; t < tokens; t++)
    if (slot[t] < 0 || slot[t] >= blocks * a.block_size)
      return invalid("slot " + std::to_string(slot[t]) + " of token " + std::to_string(t) +
                     " is outside the pool of " + std::to_string(blocks * a.block_size) + " slots");
  const Kernels& kernels = kernels_of(options.isa);
  const size_t item = bytes_of(a.kv_dtype);
  auto write_head = [&](const ffi::AnyBuffer& rows, Dtype type, const void* dst, const float* scales,
                        int64_t t, int head) {
    const int64_t from = t * row + (int64_t)head * a.head_dim;
    const int64_t to = ((int64_t)(slot[t] / a.block_size) * a.kv_heads + head) * a.block_size +
                       slot[t] % a.block_size;
    kernels.convert((const char*)rows.untyped_data() + from * bytes_of(type), type,
                    (char*)dst + to * a.head_dim * item, a.kv_dtype, a.head_dim,
                    scales ? scales[head] : 1.f);
  };
  constexpr int64_t kTokensPerTask = 64;
  parallel_for(pool, (tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t i) {
    for (int64_t t = i * kTokensPerTask; t < std::min(tokens, (i + 1) * kTokensPerTask); t++) {
      if (slot[t] < a.block_size) continue;  // the null block: what is there means nothing
      for (int head = 0; head < a.kv_heads; head++) {
        write_head(k, k_dtype, a.k_pool, a.k_scale, t, head);
        write_head(v, v_dtype, a.v_pool, a.v_scale, t, head);
      }
    }
  });
  const int requests = (int)contexts.element_count();
  run_attention(pool, kernels, a, requests);
  clear_padding(a, requests, tokens);
  return ffi::Error::Success();
}

// How many of x's rows come before those at its end that hold nothing but zeros; both zeros of a
// float are the bits of an integer that vanishes when shifted by one.
template <class Bits>
int64_t rows_before_zeros(const Bits* x, int64_t rows, int64_t k) {
  for (; rows > 0; rows--) {
    const Bits* row = x + (rows - 1) * k;
    Bits any = 0;
    for (int64_t i = 0; i < k; i++) any |= row[i];
    if (Bits(any << 1)) break;
  }
  return rows;
}

// scale is f32 [N] for int8 weights and [0] for others. Rows of zeros at the end of x, with which
// batches are padded, give zeros without being multiplied.
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                  ffi::Buffer<ffi::F32> scale, ffi::Result<ffi::AnyBuffer> out, int32_t isa) {
  auto xd = x.dimensions(), wd = w.dimensions();
  if (xd.size() != 2 || wd.size() != 2 || xd[1] != wd[1])
    return invalid("linear takes x [M, K] and w [N, K]");
  const bool scaled = w.element_type() == ffi::DataType::S8;
  if ((int64_t)scale.element_count() != (scaled ? wd[0] : 0))
    return invalid("linear takes a scale per row of int8 weights, and none for others");
  const Kernels& kernels = kernels_of(isa);
  LinearArgs a{};
  Dtype x_dtype;
  if (!float_dtype(x.element_type(), x_dtype) ||
      !(scaled || float_dtype(w.element_type(), a.w_dtype)) ||
      !float_dtype(out->element_type(), a.out_dtype))
    return invalid("linear takes f32, bf16 or f16, and int8 weights");
  if (scaled) {
    a.w_dtype = I8;
    a.w_scale = scale.typed_data();
  }
  a.w = w.untyped_data();
  a.out = out->untyped_data();
  a.k = xd[1];
  a.n = wd[0];
  a.m = x_dtype == F32 ? rows_before_zeros((const uint32_t*)x.untyped_data(), xd[0], a.k)
                       : rows_before_zeros((const uint16_t*)x.untyped_data(), xd[0], a.k);
  const size_t row_of_out = a.n * bytes_of(a.out_dtype);
  std::memset((char*)a.out + a.m * row_of_out, 0, (xd[0] - a.m) * row_of_out);
  if (a.m == 0 || a.n == 0) return ffi::Error::Success();
  a.k_padded = kernels.linear_k_padded(a.k, a.w_dtype);
  const int64_t bytes_of_x = kernels.packed_bytes(a.w_dtype);
  std::unique_ptr<float[]> packed, x_scale;
  if (x_dtype == F32 && (a.w_dtype == F32 || a.w_dtype == F16) && a.k_padded == a.k) {
    a.x = x.untyped_data();
  } else {
    const int64_t bytes = a.k_padded * bytes_of_x;
    packed.reset(new float[(a.m * bytes + 3) / 4]);
    a.x = packed.get();
    if (scaled) x_scale.reset(new float[a.m]);
    a.x_scale = x_scale.get();
    constexpr int64_t kRowsPerTask = 32;
    parallel_for(pool, (a.m + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t i) {
      const int64_t first = i * kRowsPerTask;
      kernels.pack_rows((const char*)x.untyped_data() + first * a.k * bytes_of(x_dtype), x_dtype,
                        std::min(kRowsPerTask, a.m - first), a.k, a.k_padded, a.w_dtype,
                        (char*)packed.get() + first * bytes, scaled ? x_scale.get() + first : nullptr);
    });
  }
  // Blocks of rows one after the other, so that a block of x stays in the caches while the columns
  // go by: all of x in turn for each few columns would come from memory again and again.
  const int64_t blocks = (a.m + kLinearRows - 1) / kLinearRows;
  const int64_t columns = (a.n + kLinearColumns - 1) / kLinearColumns;
  // Cost in multiply-adds; reading a weight costs as much as four. Below some 30 us waking a thread
  // does not pay; above, a thread should find a few claims, and a claim be worth taking.
  constexpr int64_t kWorthSharing = 1 << 20, kWorthClaiming = 1 << 18;
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t rows = std::max<int64_t>(4, std::min<int64_t>(a.m, kLinearRows));
  const int64_t cost = columns * kLinearColumns * a.k * rows;
  const int64_t claims = cost < kWorthSharing ? 1 : std::min(cost / kWorthClaiming, 16 * threads);
  const int64_t per_claim = (columns + claims - 1) / claims;
  const int64_t per_block = (columns + per_claim - 1) / per_claim;
  parallel_for(pool, blocks * per_block, [&](int64_t i) {
    const int64_t first = i / per_block * kLinearRows, claim = i % per_block;
    LinearArgs block = a;
    block.x = (const char*)a.x + first * a.k_padded * bytes_of_x;
    block.x_scale = a.x_scale ? a.x_scale + first : nullptr;
    block.out = (char*)a.out + first * a.n * bytes_of(a.out_dtype);
    block.m = std::min<int64_t>(kLinearRows, a.m - first);
    for (int64_t c = claim * per_claim; c < std::min(columns, (claim + 1) * per_claim); c++)
      kernels.linear(block, c * kLinearColumns, std::min(a.n, (c + 1) * kLinearColumns));
  });
  return ffi::Error::Success();
}

// Zeros in huge pages, where the kernel grants them: attention reads a block here and a block there,
// and finding their pages costs more than reading them. Pages given back come anew as zeros when they
// are first touched, so a large pool neither costs time nor memory before it is used.
ffi::Error zeros(ffi::Result<ffi::AnyBuffer> out) {
  char* first = (char*)out->untyped_data();
  const size_t size = out->size_bytes();
#if defined(__linux__)
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  char* start = (char*)(((uintptr_t)first + page - 1) / page * page);
  char* end = (char*)(((uintptr_t)first + size) / page * page);
  if (start < end && madvise(start, end - start, MADV_DONTNEED) == 0) {
    madvise(start, end - start, MADV_HUGEPAGE);
    memset(first, 0, start - first);
    memset(end, 0, first + size - end);
    return ffi::Error::Success();
  }
#endif
  memset(first, 0, size);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace cpu_kernels

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    cpu_kernels::Options, xla::ffi::StructMember<float>("scale"),
    xla::ffi::StructMember<float>("soft_cap"), xla::ffi::StructMember<int32_t>("window"),
    xla::ffi::StructMember<int32_t>("kv_dtype"), xla::ffi::StructMember<int32_t>("has_sinks"),
    xla::ffi::StructMember<int32_t>("has_k_scale"), xla::ffi::StructMember<int32_t>("has_v_scale"),
    xla::ffi::StructMember<int32_t>("return_lse"), xla::ffi::StructMember<int32_t>("isa"));

EXPORT const char* cpu_kernels_source_hash() { return SOURCE_HASH; }
EXPORT int cpu_kernels_ffi_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }
EXPORT int cpu_kernels_supported_level() { return cpu_kernels::supported_level(); }

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(cpu_kernels_attention, cpu_kernels::attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attrs<cpu_kernels::Options>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(cpu_kernels_write_and_attend, cpu_kernels::write_and_attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attrs<cpu_kernels::Options>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(cpu_kernels_linear, cpu_kernels::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(cpu_kernels_zeros, cpu_kernels::zeros,
                              ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
#pragma GCC visibility pop
