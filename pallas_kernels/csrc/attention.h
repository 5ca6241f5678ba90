// Ragged paged attention: one tile of query rows against the pages of one KV head.
//
// The bits of an output row depend on its own query and context alone, never on the rows beside it,
// the chunk it came in, the batch or the threads: every dot product adds in one order, softmax steps
// and partial results begin at fixed multiples of the context position, and partial results are
// merged in order, whether one unit walks all of them or several share them.
#pragma once
#include "attention_block.h"

namespace cpu_kernels {
namespace ISA_NS {

// Rows up to which K and V are read where they lie; panels pay where more rows share them, and fp8
// is dear to widen twice.
INLINE int direct_rows(Dtype type) {
  return type == F8_E4M3 || type == F8_E5M2 ? kMaxRows : 2 * kMaxRows;
}

INLINE Tile carve(float* p, int rows, int d) {
  Tile t;
  t.q = p, p += rows * d;
  t.o = p, p += rows * d;
  t.total = p, p += rows * d;
  t.m = p, p += kTileRows;
  t.l = p, p += kTileRows * W;
  t.total_m = p, p += kTileRows;
  t.total_l = p, p += kTileRows;
  t.top = p, p += kTileRows;
  t.factor = p, p += kTileRows;
  t.position = (int32_t*)p, p += kTileRows;
  t.scores = p, p += kTileRows * kBlockTokens;
  t.panels = p;
  return t;
}
INLINE int64_t scratch_floats(const AttentionArgs& a) {
  return (int64_t)kTileRows * (3 * a.head_dim + kBlockTokens + W + 6) + panels_floats(a.head_dim);
}

// One step of the online softmax (Milakov and Gimelshein, 2018): the rows' scores of a block become
// weights, zero outside what a row sees, and factor[r] is what was summed before now counts. First
// all maxima and then all exponentials: so the rows of one pass do not wait for the other's.
static void softmax(const Block& b, Tile& w) {
  constexpr int N = 4, step = N * W;  // vectors whose exponentials are taken together
  const vf lowest = splat(-INFINITY);
  for (int r = 0; r < b.u.rows; r++) {
    float* scores = w.scores + r * kBlockTokens;
    const Span s = b.seen(r, 1), whole = s.within(step);
    if (b.a.soft_cap > 0)
      for (int j = whole.lo; j < whole.hi; j += W)
        store(scores + j, tanh_of(load(scores + j) / b.a.soft_cap) * b.a.soft_cap);
    for (int j = whole.lo; j < min_of(s.lo, whole.hi); j++) scores[j] = -INFINITY;
    for (int j = max_of(s.hi, whole.lo); j < whole.hi; j++) scores[j] = -INFINITY;
    vf top = lowest;
    for (int j = whole.lo; j < whole.hi; j += W) top = max_of(top, load(scores + j));
    w.top[r] = max_of(w.m[r], max_across(top));
  }
  for (int r = 0; r < b.u.rows; r += W) {
    vf top = load(w.top + r);
    store(w.factor + r, exp_of(load(w.m + r) - top));
    store(w.m + r, top);
  }
  for (int r = 0; r < b.u.rows; r++) {
    float* scores = w.scores + r * kBlockTokens;
    const Span whole = b.seen(r, 1).within(step);
    for (int j = 0; j < whole.lo; j += W) store(scores + j, (vf){});
    for (int j = whole.hi; j < kBlockTokens; j += W) store(scores + j, (vf){});
    vf sum = load(w.l + r * W) * w.factor[r];
    for (int j = whole.lo; j < whole.hi; j += step) {
      vf x[N];
      for (int i = 0; i < N; i++) x[i] = load(scores + j + i * W) - w.m[r];
      exponentiate(x);
      for (int i = 0; i < N; i++) {
        x[i] = load(scores + j + i * W) == lowest ? (vf){} : x[i];
        store(scores + j + i * W, x[i]);
        sum += x[i];
      }
    }
    store(w.l + r * W, sum);
  }
}

// (total, m, l) becomes the softmax state over its tokens and those of another state.
static void merge_state(float* total, float& total_m, float& total_l, const float* o, float m,
                        float l, int d) {
  if (m == -INFINITY) return;
  float next = max_of(total_m, m);
  float a = total_m == -INFINITY ? 0.f : total_m == next ? 1.f : exp_of(total_m - next);
  float b = m == next ? 1.f : exp_of(m - next);
  for (int i = 0; i < d; i += W)
    store(total + i, fma(load(o + i), splat(b), load(total + i) * a));
  total_l = total_l * a + l * b;
  total_m = next;
}

INLINE bool pairs_pool(const AttentionArgs& a) { return a.kv_dtype == BF16; }

INLINE void load_queries(const AttentionArgs& a, const AttentionUnit& u, float* q) {
  const int group = a.heads / a.kv_heads, d = a.head_dim;
  const float scale = a.scale * (a.k_scale ? a.k_scale[u.head] : 1.f);
  float plain[kMaxHeadDim];
  for (int r = 0; r < u.rows; r++) {
    int row = u.row0 + r, token = a.query_starts[u.request] + row / group;
    int64_t offset = ((int64_t)token * a.heads + u.head * group + row % group) * d;
    const float* src = plain;
    if (a.q_dtype == F32) {
      src = (const float*)a.q + offset;
    } else {
      for (int i = 0; i < d; i += W)
        store(plain + i, a.q_dtype == BF16 ? load((const bf16*)a.q + offset + i)
                                           : load((const f16*)a.q + offset + i));
    }
    float* dst = q + r * d;
    if (pairs_pool(a)) {
      pair(src, d, dst);
      src = dst;
    }
    for (int i = 0; i < d; i += W) store(dst + i, load(src + i) * scale);
  }
}

INLINE void finish(const AttentionArgs& a, const AttentionUnit& u, float* o, float* m, float* l) {
  const int group = a.heads / a.kv_heads, d = a.head_dim;
  float plain[kMaxHeadDim];
  for (int r = 0; r < u.rows; r++) {
    int row = u.row0 + r, token = a.query_starts[u.request] + row / group;
    int head = u.head * group + row % group;
    float factor = 1.f, sum = l[r], top = m[r];
    if (a.sinks) {  // a logit that takes weight and gives no value
      float next = max_of(top, a.sinks[head]);
      factor = top == -INFINITY ? 0.f : exp_of(top - next);
      sum = sum * factor + (a.sinks[head] == -INFINITY ? 0.f : exp_of(a.sinks[head] - next));
      top = next;
    }
    if (a.lse)
      a.lse[(int64_t)token * a.heads + head] = sum > 0 ? top + logf(sum) : -INFINITY;
    factor = sum > 0 ? factor / sum : 0.f;
    if (a.v_scale) factor *= a.v_scale[u.head];
    const float* src = o + r * d;
    for (int i = 0; i < d; i += W) store(o + r * d + i, load(src + i) * factor);
    if (pairs_pool(a)) {
      unpair(src, d, plain);
      src = plain;
    }
    int64_t offset = ((int64_t)token * a.heads + head) * d;
    for (int i = 0; i < d; i += W) {
      vf x = load(src + i);
      if (a.q_dtype == F32) store((float*)a.out + offset + i, x);
      else if (a.q_dtype == BF16) store((bf16*)a.out + offset + i, x);
      else store((f16*)a.out + offset + i, x);
    }
  }
}

// Attends from the tile's rows to the unit's splits.
template <class Source> static void walk(const AttentionArgs& a, const AttentionUnit& u, Tile& w) {
  const int group = a.heads / a.kv_heads, d = a.head_dim;
  const int queries = a.query_starts[u.request + 1] - a.query_starts[u.request];
  for (int r = 0; r < u.rows; r++) {
    w.position[r] = a.context_lens[u.request] - queries + (u.row0 + r) / group;
    w.total_m[r] = -INFINITY, w.total_l[r] = 0;
  }
  const int last = w.position[u.rows - 1];
  const int first = a.window > 0 ? max_of(0, w.position[0] - a.window + 1) : 0;
  Source source;
  memset(w.total, 0, sizeof(float) * u.rows * d);
  for (int split = u.split0; split < u.split1; split++) {
    for (int r = 0; r < u.rows; r++) w.m[r] = -INFINITY;
    memset(w.l, 0, sizeof(float) * u.rows * W);
    memset(w.o, 0, sizeof(float) * u.rows * d);
    const int end = min_of((split + 1) * kSplitTokens, last + 1);
    const int start = max_of(split * kSplitTokens, first);
    for (int b0 = start / kBlockTokens * kBlockTokens; b0 < end; b0 += kBlockTokens) {
      const Block block{a, u, w.position, b0,
                        {max_of(0, start - b0), min_of(kBlockTokens, end - b0)}};
      source.scores(block, w);
      softmax(block, w);
      source.add_values(block, w);
    }
    for (int r = 0; r < u.rows; r++)
      merge_state(w.total + r * d, w.total_m[r], w.total_l[r], w.o + r * d, w.m[r],
                  sum_across(load(w.l + r * W)), d);
  }
}

static void attend(const AttentionArgs& a, const AttentionUnit& u, float* scratch) {
  const int d = a.head_dim;
  Tile w = carve(scratch, u.rows, d);
  load_queries(a, u, w.q);
  if (u.rows > direct_rows(a.kv_dtype)) walk<Panels>(a, u, w);
  else
    for_dtype(a.kv_dtype,
              [&](auto type) { walk<InPool<typename decltype(type)::type>>(a, u, w); });
  if (u.partial) {
    memcpy(u.partial, w.total, sizeof(float) * u.rows * d);
    memcpy(u.partial + u.rows * d, w.total_m, sizeof(float) * u.rows);
    memcpy(u.partial + u.rows * (d + 1), w.total_l, sizeof(float) * u.rows);
  } else {
    finish(a, u, w.total, w.total_m, w.total_l);
  }
}

static void merge(const AttentionArgs& a, const AttentionUnit& u, const float* partials, int parts,
                  float* scratch) {
  const int d = a.head_dim;
  Tile w = carve(scratch, u.rows, d);
  for (int r = 0; r < u.rows; r++) w.total_m[r] = -INFINITY, w.total_l[r] = 0;
  memset(w.total, 0, sizeof(float) * u.rows * d);
  for (int part = 0; part < parts; part++) {
    const float *o = partials + (int64_t)part * u.rows * (d + 2), *m = o + u.rows * d;
    for (int r = 0; r < u.rows; r++)
      merge_state(w.total + r * d, w.total_m[r], w.total_l[r], o + r * d, m[r], m[u.rows + r], d);
  }
  finish(a, u, w.total, w.total_m, w.total_l);
}

}  // namespace ISA_NS
}  // namespace cpu_kernels
