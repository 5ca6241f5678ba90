// Scores and weighted sums of a tile's rows over one block of context, from K and V where they lie
// (InPool) or from f32 copies that many rows share (Panels). Both add in the same order: a score as
// one sum per lane of the vectors along D, then those as sum4 does; an output token by token.
#pragma once
#include "vec.h"

namespace cpu_kernels {
namespace ISA_NS {
namespace {  // what is not inlined must not reach the linker, see kernels.h

struct Tile {
  float *q, *o, *total;  // [rows, D]: scaled queries, the split's output, the merged output
  float *m, *l, *total_m, *total_l;  // [rows]; l has a sum for each lane, [rows, W]
  int32_t* position;                 // [rows]: of the queries in the context
  float* top;                        // [rows]: m after this block
  float* factor;                     // [rows]: what the block's weights make of o before them
  float* scores;                     // [rows, kBlockTokens]: of one block, then its weights
  float* panels;                     // K or V of one block, widened
};

// Tokens [lo, hi) of a block.
struct Span {
  int lo, hi;
  // Those of the groups of `size` that it touches.
  Span within(int size) const {
    return lo < hi ? Span{lo / size * size, (hi + size - 1) / size * size} : Span{0, 0};
  }
};

// One block of context as one tile sees it.
struct Block {
  const AttentionArgs& a;
  const AttentionUnit& u;
  const int32_t* position;  // [rows]: of the tile's queries in the context
  int first;                // the same of the block's first token
  Span tokens;              // those that the tile sees in this split

  // Those that any of `count` rows from r on sees.
  Span seen(int r, int count) const {
    return {a.window > 0 ? max_of(tokens.lo, position[r] - a.window + 1 - first) : tokens.lo,
            min_of(tokens.hi, position[r + count - 1] + 1 - first)};
  }
};

// Where the tokens of one block of context lie.
template <class T> struct BlockRows {
  const T* k[kBlockTokens];
  const T* v[kBlockTokens];
};
// Those at context positions [t0, t1) under the unit's KV head, from rows.k[0] and rows.v[0] on.
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

// o[r, 0 : V * W] = factor[r] o[r] + sum over j of weights[r, j] row(j). o has rows of d.
template <int R, int V, class F>
INLINE void add_weighted(const float* weights, const float* factor, Span tokens, const F& row,
                         int d, float* o) {
  vf acc[R][V];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < V; i++) acc[r][i] = load(o + r * d + i * W) * factor[r];
  for (int j = tokens.lo; j < tokens.hi; j++) {
    const auto* v = row(j);
    vf p[R];
    for (int r = 0; r < R; r++) p[r] = splat(weights[r * kBlockTokens + j]);
    auto add = [&](int i, vf x) __attribute__((always_inline)) {
      for (int r = 0; r < R; r++) acc[r][i] = add_product(acc[r][i], p[r], x);
    };
    for (int i = 0; i + 2 <= V; i += 2) {
      add(i, load_half<0>(v + i * W));
      add(i + 1, load_half<1>(v + i * W));
    }
    if (V % 2) add(V - 1, load(v + (V - 1) * W));
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < V; i++) store(o + r * d + i * W, acc[r][i]);
}

// ---- in the pool, with lanes along D

// Asks for a token's row.
template <class T> INLINE void prefetch(const T* row, int d) {
  for (int i = 0; i < d; i += 64 / (int)sizeof(T)) __builtin_prefetch(row + i);
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

template <class T> struct InPool {
  BlockRows<T> rows, next;

  // While the tile's first rows read K, V is asked for.
  void scores(const Block& b, Tile& w) {
    const int d = b.a.head_dim;
    find_rows(b.a, b.u, b.first + b.tokens.lo, b.first + b.tokens.hi, rows);
    for_row_groups(b.u.rows, [&](auto size, int r0) __attribute__((always_inline)) {
      constexpr int R = decltype(size)::value;
      const Span s = b.seen(r0, R);
      const float* q = w.q + r0 * d;
      float* scores = w.scores + r0 * kBlockTokens;
      int j = s.lo;
      for (; j + 4 <= s.hi; j += 4) {
        if (r0 == 0)
          for (int t = 0; t < 4; t++) prefetch(rows.v[j + t - b.tokens.lo], d);
        vf acc[R][4];
        dot_tokens(q, rows.k + (j - b.tokens.lo), d, acc);
        for (int r = 0; r < R; r++)
          *(v4f*)(scores + r * kBlockTokens + j) =
              sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
      }
      for (; j < s.hi; j++) {
        vf acc[R][1];
        dot_tokens(q, rows.k + (j - b.tokens.lo), d, acc);
        for (int r = 0; r < R; r++) {
          vf a = acc[r][0];
          scores[r * kBlockTokens + j] = sum4(a, a, a, a)[0];
        }
      }
    });
  }

  // While the tile's first rows read V, the K that comes next is asked for.
  void add_values(const Block& b, Tile& w) {
    const int d = b.a.head_dim, behind = b.first + kBlockTokens;
    const int ahead = min_of(kBlockTokens, b.position[b.u.rows - 1] + 1 - behind);
    if (ahead > 0) find_rows(b.a, b.u, behind, behind + ahead, next);
    for_row_groups(b.u.rows, [&](auto size, int r0) __attribute__((always_inline)) {
      constexpr int R = decltype(size)::value;
      const Span s = b.seen(r0, R);
      if (s.lo >= s.hi) return;
      int i = 0;
      auto row = [&](int j) __attribute__((always_inline)) {
        if (i == 0 && r0 == 0 && j - s.lo < ahead) prefetch(next.k[j - s.lo], d);
        return rows.v[j - b.tokens.lo] + i;
      };
      auto add = [&](auto vectors) __attribute__((always_inline)) {
        add_weighted<R, decltype(vectors)::value>(w.scores + r0 * kBlockTokens, w.factor + r0, s,
                                                  row, d, w.o + r0 * d + i);
      };
      for (; i + 4 * W <= d; i += 4 * W) add(Int<4>());
      for (; i + 2 * W <= d; i += 2 * W) add(Int<2>());
      if (i < d) add(Int<1>());
    });
  }
};

// ---- in panels, with lanes along tokens for K and along D for V

// K lies as [D, kPanel] for each kPanel tokens of a block, V as [kBlockTokens, kPanel] for each
// kPanel values of D: what a register tile reads is in one piece, and small enough for the first
// cache while all rows of the tile go by.
constexpr int kPanel = 4 * W;
static_assert(kBlockTokens % kPanel == 0, "a block is whole panels");

INLINE int64_t panels_floats(int d) {
  return (int64_t)kBlockTokens * ((d + kPanel - 1) / kPanel * kPanel);
}

// Calls f(Int<vectors>) for 1 to 4 vectors.
template <class F> INLINE void for_width(int vectors, const F& f) {
  switch (vectors) {
    case 1: return f(Int<1>());
    case 2: return f(Int<2>());
    case 3: return f(Int<3>());
    default: return f(Int<4>());
  }
}

// acc[r, i] = q[r, 0] k[i], added to what is there if `more`.
template <bool more, int R, int V>
INLINE void outer(const float* q, const float* k, int d, vf (&acc)[R][V]) {
  vf x[R];
  for (int r = 0; r < R; r++) x[r] = splat(q[r * d]);
  for (int i = 0; i < V; i++) {
    vf y = load(k + i * W);
    for (int r = 0; r < R; r++) acc[r][i] = more ? add_product(acc[r][i], x[r], y) : x[r] * y;
  }
}
// acc[r, i] = what lanes [lane, lane + N) of InPool's sums come to, added as sum4 does (zeros may
// differ in sign). Two lanes at a time fill the registers; the sums of earlier ones are in memory.
template <int lane, int N, int R, int V>
INLINE void dot_lanes(const float* q, const float* k, int d, vf (&acc)[R][V]) {
  vf other[R][V];
  if constexpr (N == 2) {
    outer<false>(q + lane, k + lane * kPanel, d, acc);
    outer<false>(q + lane + 1, k + (lane + 1) * kPanel, d, other);
    for (int e = lane + W; e < d; e += W) {
      outer<true>(q + e, k + e * kPanel, d, acc);
      outer<true>(q + e + 1, k + (e + 1) * kPanel, d, other);
    }
  } else {
    dot_lanes<lane, N / 2>(q, k, d, acc);
    dot_lanes<lane + N / 2, N / 2>(q, k, d, other);
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < V; i++) acc[r][i] += other[r][i];
}

// Copies of the block's K and V. Tokens outside it, in vectors that reach there, are repetitions.
template <class T>
static void copy_k(const Block& b, float* panels) {
  const int d = b.a.head_dim;
  BlockRows<T> rows;
  find_rows(b.a, b.u, b.first + b.tokens.lo, b.first + b.tokens.hi, rows);
  float wide[4][kMaxHeadDim];
  for (int t = b.tokens.lo / 4 * 4; t < b.tokens.hi; t += 4) {
    for (int i = 0; i < 4; i++)
      widen(rows.k[min_of(max_of(t + i, b.tokens.lo), b.tokens.hi - 1) - b.tokens.lo], d, wide[i]);
    float* to = panels + t / kPanel * kPanel * d + t % kPanel;
    for (int e = 0; e < d; e += 4) {
      v4f x[4];
      for (int i = 0; i < 4; i++) x[i] = *(const v4f*)(wide[i] + e);
      transpose(x);
      for (int i = 0; i < 4; i++) *(v4f*)(to + (e + i) * kPanel) = x[i];
    }
  }
}
template <class T>
static void copy_v(const Block& b, float* panels) {
  const int d = b.a.head_dim;
  BlockRows<T> rows;
  find_rows(b.a, b.u, b.first + b.tokens.lo, b.first + b.tokens.hi, rows);
  for (int t = b.tokens.lo; t < b.tokens.hi; t++)
    for (int c = 0; c < d; c += kPanel)
      widen(rows.v[t - b.tokens.lo] + c, min_of(kPanel, d - c),
            panels + c * kBlockTokens + t * kPanel);
}

struct Panels {
  void scores(const Block& b, Tile& w) {
    const int d = b.a.head_dim;
    for_dtype(b.a.kv_dtype, [&](auto type) { copy_k<typename decltype(type)::type>(b, w.panels); });
    for (int t = 0; t < b.tokens.hi; t += kPanel)
      for_row_groups(b.u.rows, [&](auto size, int r0) __attribute__((always_inline)) {
        constexpr int R = decltype(size)::value;
        const Span s = b.seen(r0, R);
        if (s.lo >= t + kPanel || s.hi <= max_of(t, s.lo)) return;
        auto dot = [&](auto vectors, int j) __attribute__((always_inline)) {
          constexpr int V = decltype(vectors)::value;
          vf acc[R][V];
          dot_lanes<0, W>(w.q + r0 * d, w.panels + t * d + (j - t), d, acc);
          for (int r = 0; r < R; r++)
            for (int i = 0; i < V; i++)
              store(w.scores + (r0 + r) * kBlockTokens + j + i * W, acc[r][i]);
        };
        const int end = min_of(t + kPanel, (s.hi + W - 1) / W * W);
        int j = t;
        for (; j + 2 * W <= end; j += 2 * W) dot(Int<2>(), j);
        if (j < end) dot(Int<1>(), j);
      });
  }

  void add_values(const Block& b, Tile& w) {
    const int d = b.a.head_dim;
    for_dtype(b.a.kv_dtype, [&](auto type) { copy_v<typename decltype(type)::type>(b, w.panels); });
    for (int c = 0; c < d; c += kPanel) {
      const float* panel = w.panels + c * kBlockTokens;
      for_row_groups(b.u.rows, [&](auto size, int r0) __attribute__((always_inline)) {
        constexpr int R = decltype(size)::value;
        const Span s = b.seen(r0, R);
        if (s.lo >= s.hi) return;
        for_width(min_of(4, (d - c) / W), [&](auto vectors) __attribute__((always_inline)) {
          add_weighted<R, decltype(vectors)::value>(
              w.scores + r0 * kBlockTokens, w.factor + r0, s,
              [&](int j) { return panel + j * kPanel; }, d, w.o + r0 * d + c);
        });
      });
    }
  }
};

}  // namespace
}  // namespace ISA_NS
}  // namespace cpu_kernels
