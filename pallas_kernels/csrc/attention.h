// Ragged paged attention: one tile of query rows against the pages of one KV head.
//
// The bits of an output row depend on its own query and context alone, never on the rows beside it,
// the chunk it came in, the batch or the threads: every dot product adds in one order, softmax steps
// and partial results begin at fixed multiples of the context position, and partial results are
// merged in order, whether one unit walks all of them or several share them.
#pragma once
#include "vec.h"

namespace cpu_kernels {
namespace ISA_NS {

// Rows above which K and V of a block are widened to f32 once for all of them.
constexpr int kDirectRows = 2 * kMaxRows;

struct Tile {
  float *q, *o, *total;  // [rows, D]: scaled queries, the split's output, the merged output
  float *m, *l, *total_m, *total_l;  // [rows]
  float *scores;                     // [kMaxRows, kBlockTokens]
  float *k, *v;                      // [kBlockTokens, D] widened
};

INLINE Tile carve(float* p, int rows, int d) {
  Tile t;
  t.q = p, p += rows * d;
  t.o = p, p += rows * d;
  t.total = p, p += rows * d;
  t.m = p, p += kTileRows;
  t.l = p, p += kTileRows;
  t.total_m = p, p += kTileRows;
  t.total_l = p, p += kTileRows;
  t.scores = p, p += kMaxRows * kBlockTokens;
  t.k = p, p += kBlockTokens * d;
  t.v = p;
  return t;
}
INLINE int64_t scratch_floats(const AttentionArgs& a) {
  return (int64_t)a.head_dim * (3 * kTileRows + 2 * kBlockTokens) + 4 * kTileRows +
         kMaxRows * kBlockTokens;
}

// Asks for row j of n, if there are rows to ask for.
template <class T> INLINE void prefetch(const T* const* rows, int j, int n, int d) {
  if (j < n)
    for (int i = 0; i < d; i += 64 / (int)sizeof(T)) __builtin_prefetch(rows[j] + i);
}

// acc[r, t] += q[r] . k[t] over one half of 2 W values: the queries stay in registers.
template <int half, int R, int N, class T>
INLINE void dot_half(const float* q, const T* const* k, int i, int d, vf (&acc)[R][N]) {
  vf x[R];
  for (int r = 0; r < R; r++) x[r] = load(q + r * d + i + half * W);
  for (int t = 0; t < N; t++) {
    vf y = load_half<half>(k[t] + i);
    for (int r = 0; r < R; r++) acc[r][t] = fma(x[r], y, acc[r][t]);
  }
}
template <int R, int N, class T>
INLINE void dot_tokens(const float* q, const T* const* k, int d, vf (&acc)[R][N]) {
  for (int r = 0; r < R; r++)
    for (int t = 0; t < N; t++) acc[r][t] = (vf){};
  int i = 0;
  for (; i + 2 * W <= d; i += 2 * W) {
    dot_half<0>(q, k, i, d, acc);
    dot_half<1>(q, k, i, d, acc);
  }
  if (i < d)
    for (int t = 0; t < N; t++) {
      vf y = load(k[t] + i);
      for (int r = 0; r < R; r++) acc[r][t] = fma(load(q + r * d + i), y, acc[r][t]);
    }
}

// scores[r, j] = q[r] . k[j] for n tokens. `ahead`: rows that will be read soon.
template <bool fetch, int R, class T>
INLINE void dot_rows(const float* q, const T* const* k, int n, int d, float* scores,
                     const T* const* ahead, int ahead_n) {
  int j = 0;
  for (; j + 4 <= n; j += 4) {
    if (fetch)
      for (int t = 0; t < 4; t++) prefetch(ahead, j + t, ahead_n, d);
    vf acc[R][4];
    dot_tokens(q, k + j, d, acc);
    for (int r = 0; r < R; r++)
      *(v4f*)(scores + r * kBlockTokens + j) = sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
  }
  for (; j < n; j++) {
    vf acc[R][1];
    dot_tokens(q, k + j, d, acc);
    for (int r = 0; r < R; r++) {
      vf a = acc[r][0];
      scores[r * kBlockTokens + j] = sum4(a, a, a, a)[0];
    }
  }
}

// o[r, first : first + V * W] += sum over j of weights[r, j] v[j].
template <bool fetch, int R, int V, class T>
INLINE void add_weighted(const float* weights, const T* const* v, int n, int d, int first, float* o,
                         const T* const* ahead, int ahead_n) {
  vf acc[R][V];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < V; i++) acc[r][i] = load(o + r * d + first + i * W);
  for (int j = 0; j < n; j++) {
    const T* row = v[j] + first;
    if (fetch) prefetch(ahead, j, ahead_n, d);
    if constexpr (V == 1) {
      vf a = load(row);
      for (int r = 0; r < R; r++) acc[r][0] = fma(splat(weights[r * kBlockTokens + j]), a, acc[r][0]);
    } else {
      for (int i = 0; i < V; i += 2) {
        vf a = load_half<0>(row + i * W), b = load_half<1>(row + i * W);
        for (int r = 0; r < R; r++) {
          vf p = splat(weights[r * kBlockTokens + j]);
          acc[r][i] = fma(p, a, acc[r][i]);
          acc[r][i + 1] = fma(p, b, acc[r][i + 1]);
        }
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < V; i++) store(o + r * d + first + i * W, acc[r][i]);
}
template <bool fetch, int R, class T>
INLINE void add_weighted_rows(const float* weights, const T* const* v, int n, int d, float* o,
                              const T* const* ahead, int ahead_n) {
  int i = 0;
  if (4 * W <= d) {
    add_weighted<fetch, R, 4>(weights, v, n, d, i, o, ahead, ahead_n);
    i += 4 * W;
  }
  for (; i + 4 * W <= d; i += 4 * W) add_weighted<false, R, 4>(weights, v, n, d, i, o, ahead, 0);
  for (; i + 2 * W <= d; i += 2 * W) add_weighted<false, R, 2>(weights, v, n, d, i, o, ahead, 0);
  if (i < d) add_weighted<false, R, 1>(weights, v, n, d, i, o, ahead, 0);
}

// One step of the online softmax (Milakov and Gimelshein, 2018) over the block's tokens [lo, hi);
// scores become weights, zero outside. Returns the factor for what was summed before.
static float softmax_step(float* scores, int lo, int hi, float soft_cap, float& m, float& l) {
  vf lane;
  for (int i = 0; i < W; i++) lane[i] = (float)i;
  const vf lowest = splat(-INFINITY);
  vf top = lowest;
  for (int j = 0; j < kBlockTokens; j += W) {
    if (j + W <= lo || j >= hi) continue;
    vf x = load(scores + j);
    if (soft_cap > 0) x = tanh_of(x / soft_cap) * soft_cap;
    if (j < lo || j + W > hi) {
      x = lane >= splat((float)(lo - j)) ? x : lowest;
      x = lane < splat((float)(hi - j)) ? x : lowest;
    }
    store(scores + j, x);
    top = max_of(top, x);
  }
  float next = max_of(m, max_across(top));
  if (next == -INFINITY) {
    for (int j = 0; j < kBlockTokens; j += W) store(scores + j, (vf){});
    return 1.f;
  }
  float factor = m == -INFINITY ? 0.f : m == next ? 1.f : exp_of(m - next);
  vf sum = {};
  for (int j = 0; j < kBlockTokens; j += W) {
    if (j + W <= lo || j >= hi) {
      store(scores + j, (vf){});
      continue;
    }
    vf x = load(scores + j);
    vf e = exp_of(x - next);
    e = x == lowest ? (vf){} : e;
    store(scores + j, e);
    sum += e;
  }
  l = l * factor + sum_across(sum);
  m = next;
  return factor;
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
    if (pairs_pool(a))
      for (int i = 0; i < d; i++) dst[paired(i, d)] = src[i] * scale;
    else
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
      for (int i = 0; i < d; i++) plain[i] = src[paired(i, d)];
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

// Where the tokens of one block of context lie.
template <class T> struct BlockRows {
  const T* k[kBlockTokens];
  const T* v[kBlockTokens];
};
// Tokens [t0, t1) under the unit's KV head, from rows.k[0] and rows.v[0] on.
template <class T>
INLINE void find_rows(const AttentionArgs& a, const AttentionUnit& u, int t0, int t1,
                      BlockRows<T>& rows) {
  const int32_t* table = a.block_tables + (int64_t)u.request * a.table_width;
  const int64_t page = (int64_t)a.kv_heads * a.block_size * a.head_dim;
  const int64_t head = (int64_t)u.head * a.block_size * a.head_dim;
  for (int t = t0; t < t1;) {
    int offset = t % a.block_size, n = min_of(a.block_size - offset, t1 - t);
    int64_t first = table[t / a.block_size] * page + head + (int64_t)offset * a.head_dim;
    for (int i = 0; i < n; i++) {
      rows.k[t - t0 + i] = (const T*)a.k_pool + first + (int64_t)i * a.head_dim;
      rows.v[t - t0 + i] = (const T*)a.v_pool + first + (int64_t)i * a.head_dim;
    }
    t += n;
  }
}

// Copies of those rows as f32, at w.k and w.v.
template <class T>
INLINE void widen_rows(const AttentionArgs& a, const AttentionUnit& u, int t0, int t1, Tile& w) {
  BlockRows<T> rows;
  find_rows(a, u, t0, t1, rows);
  for (int j = 0; j < t1 - t0; j++) {
    widen(rows.k[j], a.head_dim, w.k + j * a.head_dim);
    widen(rows.v[j], a.head_dim, w.v + j * a.head_dim);
  }
}
static void widen_block(const AttentionArgs& a, const AttentionUnit& u, int t0, int t1, Tile& w) {
  switch (a.kv_dtype) {
    case F32: return;
    case BF16: return widen_rows<bf16>(a, u, t0, t1, w);
    case F16: return widen_rows<f16>(a, u, t0, t1, w);
    case F8_E4M3: return widen_rows<e4m3>(a, u, t0, t1, w);
    case F8_E5M2: return widen_rows<e5m2>(a, u, t0, t1, w);
    case I8: return widen_rows<i8>(a, u, t0, t1, w);
  }
}

// Attends from the tile's rows to the unit's splits. T: the type K and V are read as; widened: from
// f32 copies, which pays where many rows share them or the pool's type is dear to widen.
template <class T, bool widened>
static void walk(const AttentionArgs& a, const AttentionUnit& u, Tile& w) {
  const int group = a.heads / a.kv_heads, d = a.head_dim;
  const int queries = a.query_starts[u.request + 1] - a.query_starts[u.request];
  const int position0 = a.context_lens[u.request] - queries;
  const int first_position = position0 + u.row0 / group;
  const int last_position = position0 + (u.row0 + u.rows - 1) / group;
  const int first = a.window > 0 ? max_of(0, first_position - a.window + 1) : 0;
  const bool several = u.split1 - u.split0 > 1;
  BlockRows<T> rows, next;
  if (widened)
    for (int j = 0; j < kBlockTokens; j++)
      rows.k[j] = (const T*)(w.k + j * d), rows.v[j] = (const T*)(w.v + j * d);
  for (int r = 0; r < u.rows; r++) w.total_m[r] = -INFINITY, w.total_l[r] = 0;
  if (several) memset(w.total, 0, sizeof(float) * u.rows * d);
  for (int split = u.split0; split < u.split1; split++) {
    for (int r = 0; r < u.rows; r++) w.m[r] = -INFINITY, w.l[r] = 0;
    memset(w.o, 0, sizeof(float) * u.rows * d);
    const int end = min_of((split + 1) * kSplitTokens, last_position + 1);
    const int start = max_of(split * kSplitTokens, first);
    for (int b0 = start / kBlockTokens * kBlockTokens; b0 < end; b0 += kBlockTokens) {
      const int j0 = max_of(0, start - b0), n = min_of(kBlockTokens, end - b0);
      // While K is read, V is asked for, and while V is read, the K that comes next.
      int v_ahead = 0, k_ahead = 0;
      if (widened) {
        widen_block(a, u, b0 + j0, b0 + n, w);
      } else {
        find_rows(a, u, b0 + j0, b0 + n, rows);
        v_ahead = n - j0;
        k_ahead = min_of(kBlockTokens, last_position + 1 - b0 - kBlockTokens);
        if (k_ahead > 0) find_rows(a, u, b0 + kBlockTokens, b0 + kBlockTokens + k_ahead, next);
      }
      for_row_groups(u.rows, [&](auto size, int r0) __attribute__((always_inline)) {
        constexpr int R = decltype(size)::value;
        const int p0 = position0 + (u.row0 + r0) / group;
        const int p1 = position0 + (u.row0 + r0 + R - 1) / group;
        const int lo = a.window > 0 ? max_of(j0, p0 - a.window + 1 - b0) : j0;
        const int hi = min_of(n, p1 + 1 - b0);
        if (lo >= hi) return;
        dot_rows<!widened, R>(w.q + r0 * d, rows.k + (lo - j0), hi - lo, d, w.scores + lo, rows.v + (lo - j0),
                    r0 == 0 ? v_ahead : 0);
        for (int r = 0; r < R; r++) {
          const int p = position0 + (u.row0 + r0 + r) / group;
          const int row_lo = a.window > 0 ? max_of(lo, p - a.window + 1 - b0) : lo;
          const int row_hi = min_of(hi, p + 1 - b0);
          float factor = softmax_step(w.scores + r * kBlockTokens, row_lo, row_hi, a.soft_cap,
                                      w.m[r0 + r], w.l[r0 + r]);
          float* o = w.o + (r0 + r) * d;
          if (factor != 1.f)
            for (int i = 0; i < d; i += W) store(o + i, load(o + i) * factor);
        }
        add_weighted_rows<!widened, R>(w.scores + lo, rows.v + (lo - j0), hi - lo, d, w.o + r0 * d, next.k,
                             r0 == 0 ? k_ahead : 0);
      });
    }
    if (several)
      for (int r = 0; r < u.rows; r++)
        merge_state(w.total + r * d, w.total_m[r], w.total_l[r], w.o + r * d, w.m[r], w.l[r], d);
  }
  if (!several) {
    w.total = w.o;
    memcpy(w.total_m, w.m, sizeof(float) * u.rows);
    memcpy(w.total_l, w.l, sizeof(float) * u.rows);
  }
}

static void attend(const AttentionArgs& a, const AttentionUnit& u, float* scratch) {
  const int d = a.head_dim;
  Tile w = carve(scratch, u.rows, d);
  load_queries(a, u, w.q);
  if (a.kv_dtype == F32) walk<float, false>(a, u, w);
  else if (a.kv_dtype == BF16 && u.rows <= kDirectRows) walk<bf16, false>(a, u, w);
  else walk<float, true>(a, u, w);
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
