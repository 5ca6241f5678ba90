// out[m, n] = sum over k of x[m, k] w[n, k], with w as checkpoints store it and f32 sums.
//
// Every element is a dot product whose additions come in one order, whatever the number of rows or
// threads: so a row's bits do not depend on the batch. int8 weights have a scale per row of w; x is
// rounded to int16 with a scale per row of x, and pairs of products are summed as int32, without
// rounding, until the lanes of a sum are added and multiplied by both scales. Vector lanes run along
// k, which needs no
// repacking of w: four rows of w stay in the first cache while the rows of x go by, and a register
// tile loads seven vectors for twelve multiply-adds.
#pragma once
#include "vec.h"

namespace cpu_kernels {
namespace ISA_NS {

constexpr int kRowBlock = 48;       // rows of x that stay in the second cache
constexpr int kGroup = 2 * W;       // k per step
constexpr int kRowsAhead = 12;      // how far ahead of its use w is asked for
constexpr int kMaxWidened = 4096;   // longest row of int8 weights that is widened to int16 at once

#if defined(__AVX512BF16__)
constexpr bool kHasBf16Dot = true;
#else
constexpr bool kHasBf16Dot = false;
#endif

// What sums of products with x of type X are kept in.
template <class X> struct SumOf { typedef vf type; };
template <> struct SumOf<i16> { typedef vi type; };

// acc[r, c] += x[r] . w[c] over kGroup values, of which x stays in registers.
template <int half, int R, int C, class T>
INLINE void add_half(const float* x, int64_t stride, const T* const* w, int64_t i,
                     vf (&acc)[R][C]) {
  vf y[R];
  for (int r = 0; r < R; r++) y[r] = load(x + r * stride + i + half * W);
  for (int c = 0; c < C; c++) {
    vf a = load_half<half>(w[c] + i);
    for (int r = 0; r < R; r++) acc[r][c] = add_product(acc[r][c], y[r], a);
  }
}
template <int R, int C, class T>
INLINE void add_group(const float* x, int64_t stride, const T* const* w, int64_t i,
                      vf (&acc)[R][C]) {
  add_half<0>(x, stride, w, i, acc);
  add_half<1>(x, stride, w, i, acc);
}
template <int R, int C, class T>
INLINE void add_group(const i16* x, int64_t stride, const T* const* w, int64_t i,
                      vi (&acc)[R][C]) {
  vs y[R];
  for (int r = 0; r < R; r++) y[r] = load_shorts(x + r * stride + i);
  for (int c = 0; c < C; c++) {
    vs a = load_shorts(w[c] + i);
    for (int r = 0; r < R; r++) acc[r][c] += sums_of_pairs(y[r], a);
  }
}
#if defined(__AVX512BF16__)
// The same for x rounded to bf16: products of pairs, summed in f32.
template <int R, int C>
INLINE void add_group(const bf16* x, int64_t stride, const bf16* const* w, int64_t i,
                      vf (&acc)[R][C]) {
  __m512bh y[R];
  for (int r = 0; r < R; r++) y[r] = (__m512bh)_mm512_loadu_si512(x + r * stride + i);
  for (int c = 0; c < C; c++) {
    __m512bh a = (__m512bh)_mm512_loadu_si512(w[c] + i);
    for (int r = 0; r < R; r++) acc[r][c] = (vf)_mm512_dpbf16_ps((__m512)acc[r][c], y[r], a);
  }
}
#endif

// acc[r, c] += x[r] . w[c] over k in [0, depth), a multiple of kGroup. `fetch` asks for rows of w to
// come: rows are short, so what lies ahead of a row's end is the next row, and the processor's own
// prefetching starts anew in each.
template <bool fetch, int R, int C, class X, class T, class Sum>
INLINE void dot_tile(const X* x, int64_t stride, const T* const* w, int64_t depth,
                     Sum (&acc)[R][C]) {
  const int64_t ahead = kRowsAhead * stride;
  for (int64_t i = 0; i < depth; i += kGroup) {
    if (fetch && i * sizeof(T) % 64 == 0)
      for (int c = 0; c < C; c++) __builtin_prefetch(w[c] + i + ahead, 0, 2);
    add_group(x, stride, w, i, acc);
  }
}

// Sums of up to kLinearRows rows, before they are scaled and stored.
typedef float Sums[kLinearRows][kLinearColumns];

template <int R, int C, class Sum>
INLINE void write_tile(Sum (&acc)[R][C], int row, int column, Sums& sums) {
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c += 4) {
      const Sum* s = &acc[r][c];
      *(v4f*)&sums[row + r][column + c] =
          sum4(to_f32(s[0]), to_f32(s[1]), to_f32(s[2]), to_f32(s[3]));
    }
}

template <class T> INLINE void store_row(const float* sums, T* out, int n) {
  int i = 0;
  for (; i + W <= n; i += W) store(out + i, load(sums + i));
  if (i < n) {
    T rest[W];
    store(rest, load(sums + i));
    memcpy((void*)(out + i), (const void*)rest, sizeof(T) * (n - i));
  }
}

// Columns [n0, n1) of the result from their sums.
INLINE void write_columns(const LinearArgs& a, int64_t n0, int64_t n1, Sums& sums) {
  const int n = (int)(n1 - n0);
  for (int64_t row = 0; row < a.m; row++) {
    if (a.w_scale)
      for (int i = 0; i < n; i++) sums[row][i] *= a.x_scale[row] * a.w_scale[n0 + i];
    const int64_t at = row * a.n + n0;
    if (a.out_dtype == F32) store_row(sums[row], (float*)a.out + at, n);
    else if (a.out_dtype == BF16) store_row(sums[row], (bf16*)a.out + at, n);
    else store_row(sums[row], (f16*)a.out + at, n);
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

template <class X, int R, int C, class T>
INLINE void tile(const LinearArgs& a, int64_t row, int column, const T* const* rows, bool fetch,
                 Sums& sums) {
  const int64_t whole = a.k / kGroup * kGroup;
  const X* x = (const X*)a.x + row * a.k_padded;
  typename SumOf<X>::type acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = (typename SumOf<X>::type){};
  if (fetch) dot_tile<true>(x, a.k_padded, rows, whole, acc);
  else dot_tile<false>(x, a.k_padded, rows, whole, acc);
  if (whole < a.k) {
    T tail[C][kGroup];
    weight_tail<C>(a, rows, tail);
    const T* tails[C];
    for (int c = 0; c < C; c++) tails[c] = tail[c];
    dot_tile<false>(x + whole, a.k_padded, tails, kGroup, acc);
  }
  write_tile(acc, (int)row, column, sums);
}

// Up to kRowBlock rows of x from row0 on, with four rows of w: the sums from `column` on.
template <class X, class T>
INLINE void row_groups(const LinearArgs& a, int64_t row0, int column, const T* const* rows,
                       bool fetch, Sums& sums) {
  for_row_groups((int)min_of<int64_t>(kRowBlock, a.m - row0),
                 [&](auto size, int row) __attribute__((always_inline)) {
                   constexpr int R = decltype(size)::value;
                   tile<X, R, 4, T>(a, row0 + row, column, rows, fetch && row == 0, sums);
                 });
}

template <class X, class T>
static void columns(const LinearArgs& a, int64_t n0, int64_t n1) {
  Sums sums;
  for (int64_t row0 = 0; row0 < a.m; row0 += kRowBlock)
    for (int64_t n = n0; n < n1; n += 4) {
      const T* rows[4];
      weight_rows<4>(a, n, rows);
      row_groups<X>(a, row0, (int)(n - n0), rows, row0 == 0, sums);
    }
  write_columns(a, n0, n1, sums);
}

// int8 with more rows of x than a register tile has: four rows of w become int16 in the first cache,
// once for all rows of x.
static void columns_widened(const LinearArgs& a, int64_t n0, int64_t n1) {
  Sums sums;
  alignas(64) i16 wide[4][kMaxWidened];
  const int64_t whole = a.k / kGroup * kGroup;
  for (int64_t n = n0; n < n1; n += 4) {
    const i8* rows[4];
    const i16* wide_rows[4];
    weight_rows<4>(a, n, rows);
    for (int c = 0; c < 4; c++) {
      for (int64_t i = 0; i < whole; i += kGroup)
        *(vs*)(wide[c] + i) = load_shorts(rows[c] + i);
      for (int64_t i = whole; i < a.k; i++) wide[c][i].bits = rows[c][i].bits;
      wide_rows[c] = wide[c];
    }
    for (int64_t row0 = 0; row0 < a.m; row0 += kRowBlock)
      row_groups<i16>(a, row0, (int)(n - n0), wide_rows, false, sums);
  }
  write_columns(a, n0, n1, sums);
}

static int64_t linear_k_padded(int64_t k, Dtype) { return (k + kGroup - 1) / kGroup * kGroup; }
INLINE bool packs_bf16(Dtype w_dtype) { return kHasBf16Dot && w_dtype == BF16; }
static int64_t packed_bytes(Dtype w_dtype) { return packs_bf16(w_dtype) || w_dtype == I8 ? 2 : 4; }

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
    float* dst = (float*)packed + i;
    if (packs_bf16(w_dtype)) {
      for (int j = 0; j < kGroup; j += W) store((bf16*)packed + i + j, load(src + j));
    } else if (pairs) {
      pair(src, kGroup, dst);
    } else {
      for (int j = 0; j < kGroup; j += W) store(dst + j, load(src + j));
    }
  }
}

// W values of x from i on, zeros past the last of k.
template <class T> INLINE vf load_padded(const T* x, int64_t i, int64_t k) {
  if (i + W <= k) return load(x + i);
  T tail[W];
  memset((void*)tail, 0, sizeof tail);
  if (i < k) memcpy((void*)tail, (const void*)(x + i), sizeof(T) * (k - i));
  return load(tail);
}

// A row of x as int16 and the value of one step. The largest magnitude becomes the largest integer
// with which no lane of a sum can leave int32, beside weights of up to 128. A row that holds an
// infinity or a NaN gives NaN everywhere.
template <class T> INLINE float pack_integers(const T* x, int64_t k, int64_t k_padded, i16* packed) {
  const float limit = (float)min_of<int64_t>(32767, INT32_MAX / (128 * (k_padded / W)));
  vf top = {}, wrong = {};
  for (int64_t i = 0; i < k_padded; i += W) {
    vf v = load_padded(x, i, k);
    top = max_of(top, (vf)((vi)v & 0x7fffffff));
    wrong += v - v;
  }
  const float largest = max_across(top);
  const float inverse = largest > 1e-30f ? limit / largest : 0.f;
  for (int64_t i = 0; i < k_padded; i += W) {
    vf v = load_padded(x, i, k) * inverse;
    vi n = (vi)(v + splat(12582912.f)) - 0x4b400000;  // 1.5 x 2^23: rounds to an integer
    *(vh*)(packed + i) = __builtin_convertvector(n, vh);
  }
  return sum_across(wrong) == 0.f ? largest / limit : NAN;
}

template <class T>
INLINE void pack_rows_of(const T* x, int64_t rows, int64_t k, int64_t k_padded, Dtype w_dtype,
                         char* packed, float* scale) {
  const int64_t bytes = k_padded * packed_bytes(w_dtype);
  for (int64_t r = 0; r < rows; r++) {
    char* dst = packed + r * bytes;
    if (w_dtype == I8) scale[r] = pack_integers(x + r * k, k, k_padded, (i16*)dst);
    else pack_row(x + r * k, k, k_padded, w_dtype, dst);
  }
}

static void pack_rows(const void* x, Dtype x_dtype, int64_t rows, int64_t k, int64_t k_padded,
                      Dtype w_dtype, void* packed, float* scale) {
  char* dst = (char*)packed;
  if (x_dtype == F32) pack_rows_of((const float*)x, rows, k, k_padded, w_dtype, dst, scale);
  else if (x_dtype == BF16) pack_rows_of((const bf16*)x, rows, k, k_padded, w_dtype, dst, scale);
  else pack_rows_of((const f16*)x, rows, k, k_padded, w_dtype, dst, scale);
}

static void linear(const LinearArgs& a, int64_t n0, int64_t n1) {
  switch (a.w_dtype) {
#if defined(__AVX512BF16__)
    case BF16: return columns<bf16, bf16>(a, n0, n1);
#else
    case BF16: return columns<float, bf16>(a, n0, n1);
#endif
    case F16: return columns<float, f16>(a, n0, n1);
    case I8:
      return a.m > kMaxRows && a.k <= kMaxWidened ? columns_widened(a, n0, n1)
                                                  : columns<i16, i8>(a, n0, n1);
    default: return columns<float, float>(a, n0, n1);
  }
}

}  // namespace ISA_NS
}  // namespace cpu_kernels
