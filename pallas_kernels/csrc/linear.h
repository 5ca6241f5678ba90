// out[m, n] = sum over k of x[m, k] w[n, k], with w as checkpoints store it and f32 sums.
//
// Every element is a dot product whose additions come in one order, whatever the number of rows or
// threads: so a row's bits do not depend on the batch. Vector lanes run along k, which needs no
// repacking of w; few rows read w once at memory speed, many rows share a widened block of it.
#pragma once
#include "vec.h"

namespace cpu_kernels {
namespace ISA_NS {

constexpr int kFewRows = 2 * kMaxRows;  // up to here w is widened as it is read
constexpr int kRowBlock = 48;           // rows that share a widened block of w
constexpr int kDepthBlock = 1024;       // k per widened block
constexpr int kGroup = 2 * W;           // k per step
constexpr int kStreamAhead = 1024;      // bytes of each row of w to ask for in advance

#if defined(__AVX512BF16__)
constexpr bool kHasBf16Dot = true;
#else
constexpr bool kHasBf16Dot = false;
#endif

// What x is packed to and w is read as: f32 values and f32 accumulators per lane, or bf16 pairs.
struct F32Dot {
  using X = float;
  template <class T> static INLINE_MEMBER void load_w(const T* w, vf& a, vf& b) {
    load_pair(w, a, b);
  }
  static INLINE_MEMBER vf add(const float* x, vf a, vf b, vf acc) {
    return fma(load(x + W), b, fma(load(x), a, acc));
  }
};
#if defined(__AVX512BF16__)
struct Bf16Dot {
  using X = uint16_t;
  static INLINE_MEMBER void load_w(const bf16* w, vf& a, vf&) {
    a = (vf)_mm512_loadu_ps((const float*)w);
  }
  static INLINE_MEMBER vf add(const uint16_t* x, vf a, vf, vf acc) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_loadu_si512(x), (__m512bh)a);
  }
};
#endif

struct Partial { vf lanes[kRowBlock][kLinearColumns]; };

// acc[r, c] += x[r] . w[c] over k values, a multiple of kGroup.
template <class Dot, int R, int C, class T>
INLINE void dot_tile(const typename Dot::X* x, int64_t x_stride, const T* const* w, int64_t from,
                     int64_t to, bool stream, vf (&acc)[R][C]) {
  for (int64_t i = from; i < to; i += kGroup)
    for (int c = 0; c < C; c++) {
      vf a, b;
      Dot::load_w(w[c] + i, a, b);
      if (stream) __builtin_prefetch(w[c] + i + kStreamAhead / sizeof(T));
      for (int r = 0; r < R; r++) acc[r][c] = Dot::add(x + r * x_stride + i, a, b, acc[r][c]);
    }
}

template <int R, int C>
INLINE void write_tile(const LinearArgs& a, int64_t row, int64_t column, vf (&acc)[R][C]) {
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c += 4) {
      float sums[W < 4 ? 4 : W];
      *(v4f*)sums = sum4(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3]);
      const int valid = (int)min_of<int64_t>(4, a.n - column - c);
      const int64_t at = (row + r) * a.n + column + c;
      if (a.out_dtype == F32) {
        if (valid == 4) *(v4f*)((float*)a.out + at) = *(v4f*)sums;
        else
          for (int i = 0; i < valid; i++) ((float*)a.out)[at + i] = sums[i];
      } else {
        for (int i = 4; i < W; i++) sums[i] = 0;
        uint16_t narrow[W < 4 ? 4 : W];
        if (a.out_dtype == BF16) store((bf16*)narrow, load(sums));
        else store((f16*)narrow, load(sums));
        for (int i = 0; i < valid; i++) ((uint16_t*)a.out)[at + i] = narrow[i];
      }
    }
}

// Rows of w from `column` on; past the last row of w the last one again.
template <int C, class T>
INLINE void weight_rows(const LinearArgs& a, int64_t column, const T** rows) {
  for (int c = 0; c < C; c++)
    rows[c] = (const T*)a.w + min_of<int64_t>(column + c, a.n - 1) * a.k;
}
// The last, incomplete step of those rows, with zeros after it.
template <int C, class T>
INLINE void weight_tail(const LinearArgs& a, const T* const* rows, T (*tail)[kGroup]) {
  const int64_t whole = a.k / kGroup * kGroup;
  memset((void*)tail, 0, sizeof(T) * C * kGroup);
  for (int c = 0; c < C; c++)
    memcpy((void*)tail[c], (const void*)(rows[c] + whole), sizeof(T) * (a.k - whole));
}

template <class Dot, int R, int C, class T>
INLINE void few_rows_tile(const LinearArgs& a, int64_t row, int64_t column) {
  using X = typename Dot::X;
  const T* rows[C];
  weight_rows<C>(a, column, rows);
  const int64_t whole = a.k / kGroup * kGroup;
  const X* x = (const X*)a.x + row * a.k_padded;
  vf acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = (vf){};
  dot_tile<Dot, R, C>(x, a.k_padded, rows, 0, whole, row == 0, acc);
  if (whole < a.k) {
    T tail[C][kGroup];
    weight_tail<C>(a, rows, tail);
    const T* tails[C];
    for (int c = 0; c < C; c++) tails[c] = tail[c];
    dot_tile<Dot, R, C>(x + whole, a.k_padded, tails, 0, kGroup, false, acc);
  }
  write_tile<R, C>(a, row, column, acc);
}

template <class Dot, class T>
static void few_rows(const LinearArgs& a, int64_t n0, int64_t n1) {
  if (a.m == 1) {
    for (int64_t n = n0; n < n1; n += 8) few_rows_tile<Dot, 1, 8, T>(a, 0, n);
    return;
  }
  for (int64_t n = n0; n < n1; n += 4)
    for_row_groups((int)a.m, [&](auto size, int row) __attribute__((always_inline)) {
      few_rows_tile<Dot, decltype(size)::value, 4, T>(a, row, n);
    });
}

// k in [from, to) of columns [n0, n1) as f32, in load_pair's order, zeros past the end of k.
template <class T>
INLINE void widen_weights(const LinearArgs& a, int64_t n0, int64_t n1, int64_t from, int64_t to,
                          float* dst) {
  const int64_t depth = to - from, whole = min_of(to, a.k / kGroup * kGroup) - from;
  for (int64_t n = n0; n < n1; n++, dst += depth) {
    const T* row = (const T*)a.w + n * a.k + from;
    widen(row, whole, dst);
    if (whole < depth) {
      T tail[kGroup];
      memset((void*)tail, 0, sizeof tail);
      memcpy((void*)tail, (const void*)(row + whole), sizeof(T) * (a.k - from - whole));
      widen(tail, kGroup, dst + whole);
    }
  }
}

// Rows [row0, row0 + rows) by columns [n0, n1) over k in [from, to), whose widened weights are at w.
// Lane sums wait in `partial` between blocks of k.
static void multiply_block(const LinearArgs& a, int64_t row0, int rows, int64_t n0, int64_t n1,
                           int64_t from, int64_t to, const float* w, Partial& partial) {
  const int64_t depth = to - from;
  for (int64_t n = n0; n < n1; n += 4) {
    const float* columns[4];
    for (int c = 0; c < 4; c++) columns[c] = w + min_of<int64_t>(n + c - n0, n1 - 1 - n0) * depth;
    for_row_groups(rows, [&](auto size, int r0) __attribute__((always_inline)) {
      constexpr int R = decltype(size)::value;
      vf acc[R][4];
      for (int r = 0; r < R; r++)
        for (int c = 0; c < 4; c++)
          acc[r][c] = from > 0 ? partial.lanes[r0 + r][n - n0 + c] : (vf){};
      dot_tile<F32Dot, R, 4>((const float*)a.x + (row0 + r0) * a.k_padded + from, a.k_padded,
                             columns, 0, depth, false, acc);
      if (to == a.k_padded) return write_tile<R, 4>(a, row0 + r0, n, acc);
      for (int r = 0; r < R; r++)
        for (int c = 0; c < 4; c++) partial.lanes[r0 + r][n - n0 + c] = acc[r][c];
    });
  }
}

static void many_rows(const LinearArgs& a, int64_t n0, int64_t n1, float* scratch) {
  Partial& partial = *(Partial*)scratch;
  float* w = scratch + sizeof(Partial) / sizeof(float);
  const int64_t blocks = (a.k_padded + kDepthBlock - 1) / kDepthBlock;
  const int64_t step = (a.k_padded / blocks + kGroup - 1) / kGroup * kGroup;
  for (int64_t row0 = 0; row0 < a.m; row0 += kRowBlock) {
    const int rows = (int)min_of<int64_t>(kRowBlock, a.m - row0);
    for (int64_t from = 0; from < a.k_padded; from += step) {
      const int64_t to = min_of(from + step, a.k_padded);
      switch (a.w_dtype) {
        case BF16: widen_weights<bf16>(a, n0, n1, from, to, w); break;
        case F16: widen_weights<f16>(a, n0, n1, from, to, w); break;
        default: widen_weights<float>(a, n0, n1, from, to, w);
      }
      multiply_block(a, row0, rows, n0, n1, from, to, w, partial);
    }
  }
}

static int64_t linear_k_padded(int64_t k, Dtype) { return (k + kGroup - 1) / kGroup * kGroup; }
static bool packs_bf16(Dtype w_dtype) { return kHasBf16Dot && w_dtype == BF16; }

template <class T>
INLINE void pack_row(const T* x, int64_t k, int64_t k_padded, Dtype w_dtype, char* packed) {
  const bool pairs = w_dtype == BF16 && !packs_bf16(w_dtype);
  for (int64_t i = 0; i < k_padded; i += kGroup) {
    T tail[kGroup];
    const T* src = x + i;
    if (i + kGroup > k) {
      memset((void*)tail, 0, sizeof tail);
      memcpy((void*)tail, (const void*)src, sizeof(T) * (k - i));
      src = tail;
    }
    float plain[kGroup];
    store(plain, load(src));
    store(plain + W, load(src + W));
    if (packs_bf16(w_dtype)) {
      for (int j = 0; j < kGroup; j += W) store((bf16*)packed + i + j, load(plain + j));
      continue;
    }
    float* dst = (float*)packed + i;
    if (pairs) {
      for (int j = 0; j < W; j++) dst[j] = plain[2 * j], dst[j + W] = plain[2 * j + 1];
    } else {
      memcpy(dst, plain, sizeof plain);
    }
  }
}

static void pack_rows(const void* x, Dtype x_dtype, int64_t rows, int64_t k, int64_t k_padded,
                      Dtype w_dtype, void* packed) {
  const int64_t bytes = k_padded * (packs_bf16(w_dtype) ? 2 : 4);
  for (int64_t r = 0; r < rows; r++) {
    char* dst = (char*)packed + r * bytes;
    if (x_dtype == F32) pack_row((const float*)x + r * k, k, k_padded, w_dtype, dst);
    else if (x_dtype == BF16) pack_row((const bf16*)x + r * k, k, k_padded, w_dtype, dst);
    else pack_row((const f16*)x + r * k, k, k_padded, w_dtype, dst);
  }
}

static int64_t linear_scratch(const LinearArgs& a) {
  if (a.m <= kFewRows || packs_bf16(a.w_dtype)) return 0;
  return (int64_t)(sizeof(Partial) / sizeof(float)) +
         kLinearColumns * (min_of<int64_t>(a.k_padded, kDepthBlock) + kGroup);
}

static void linear(const LinearArgs& a, int64_t n0, int64_t n1, float* scratch) {
#if defined(__AVX512BF16__)
  if (a.w_dtype == BF16) return few_rows<Bf16Dot, bf16>(a, n0, n1);
#endif
  if (a.m > kFewRows) return many_rows(a, n0, n1, scratch);
  switch (a.w_dtype) {
    case BF16: return few_rows<F32Dot, bf16>(a, n0, n1);
    case F16: return few_rows<F32Dot, f16>(a, n0, n1);
    default: return few_rows<F32Dot, float>(a, n0, n1);
  }
}

}  // namespace ISA_NS
}  // namespace cpu_kernels
