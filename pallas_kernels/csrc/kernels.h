// What the XLA handlers (handlers.cc) and the per-instruction-set kernels (isa.cc) agree on.
//
// isa.cc is compiled once per instruction set, so nothing here or in what it includes may
// instantiate a standard-library template or an inline function with external linkage: the linker
// would keep one copy of it, and that copy could hold instructions an older CPU does not know.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cpu_kernels {

enum Dtype : int32_t { F32 = 0, BF16 = 1, F16 = 2, F8_E4M3 = 3, F8_E5M2 = 4, I8 = 5 };

constexpr int kTileRows = 96;     // query rows (token x head of the group) in one tile
constexpr int kBlockTokens = 64;  // context tokens per softmax step; starts at multiples of itself
constexpr int kSplitTokens = 512; // context tokens per partial result; starts at multiples of itself
constexpr int kMaxHeadDim = 512;
// Of one call of `linear`, whose sums are on the stack.
constexpr int kLinearColumns = 16;
constexpr int kLinearRows = 192;

// Paged attention over a pool [P, K, B, D]. Strides are in elements.
struct AttentionArgs {
  const void* q;         // [T, H, D]
  const void* k_pool;    // [P, K, B, D]
  const void* v_pool;
  void* out;             // [T, H, D]
  float* lse;            // [T, H] or null
  const float* sinks;    // [H] or null
  const float* k_scale;  // [K] or null
  const float* v_scale;
  const int32_t* block_tables;  // [R, M]
  const int32_t* context_lens;  // [R]
  const int32_t* query_starts;  // [R + 1]
  int heads, kv_heads, head_dim, block_size, table_width;
  int window;  // 0: none
  float scale, soft_cap;
  Dtype q_dtype, kv_dtype;
};

// Rows [row0, row0 + rows) of one request under one KV head, over splits [split0, split1) of its
// context. Row r is query token r / group, head r % group of the KV head's group.
struct AttentionUnit {
  int request, head, row0, rows, split0, split1;
  float* partial;  // null: finish here; else rows x (head_dim + 2) floats: output, maximum, sum
};

struct LinearArgs {
  const void* x;  // packed by pack_rows: [m, k_padded] of packed_bytes each
  const void* w;  // [n, k]
  void* out;      // [m, n]
  int64_t m, n, k, k_padded;
  const float* w_scale;  // [n], what each row of int8 weights counts; null for others
  const float* x_scale;  // [m], what each row of x counts beside int8 weights
  Dtype w_dtype, out_dtype;
};

struct Kernels {
  const char* name;
  int64_t (*attention_scratch)(const AttentionArgs&);  // floats that attend needs
  void (*attend)(const AttentionArgs&, const AttentionUnit&, float* scratch);
  // Merges `parts` partial results of the unit, in order, and writes the output rows.
  void (*merge)(const AttentionArgs&, const AttentionUnit&, const float* partials, int parts,
                float* scratch);
  // dst[i] = src[i] / scale in dst's type: rounded to nearest even; fp8 and int8 saturate.
  void (*convert)(const void* src, Dtype src_dtype, void* dst, Dtype dst_dtype, int64_t n,
                  float scale);
  int64_t (*linear_k_padded)(int64_t k, Dtype w_dtype);
  // Bytes of a packed value of x: f32, or bf16 or int16 where products are made of those.
  int64_t (*packed_bytes)(Dtype w_dtype);
  // `scale` [rows] is written for int8 weights only.
  void (*pack_rows)(const void* x, Dtype x_dtype, int64_t rows, int64_t k, int64_t k_padded,
                    Dtype w_dtype, void* packed, float* scale);
  // Columns [n0, n1) of the product; n1 - n0 <= kLinearColumns and m <= kLinearRows.
  void (*linear)(const LinearArgs&, int64_t n0, int64_t n1);
};

namespace isa_base { const Kernels& kernels(); }
#if defined(__x86_64__)
namespace isa_avx2 { const Kernels& kernels(); }
namespace isa_avx512 { const Kernels& kernels(); }
namespace isa_avx512bf16 { const Kernels& kernels(); }
#endif

}  // namespace cpu_kernels
