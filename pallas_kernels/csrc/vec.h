// Vectors of f32 in the widest registers of the instruction set being compiled for, as GCC and
// Clang vector extensions; intrinsics only where the extensions say nothing (fused multiply-add,
// f16, shuffles). The build turns contraction off: a multiply-add is fused where it says fma, so
// every code path that must give the same bits does.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))

namespace cpu_kernels {
namespace ISA_NS {

#if defined(__AVX512F__)
constexpr int W = 16;
constexpr int kMaxRows = 4;  // rows of a register tile: 4 x 4 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int kMaxRows = 3;  // 3 x 4 accumulators of 16 registers
#else
constexpr int W = 4;
constexpr int kMaxRows = 3;
#endif

typedef float vf __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(W * 2), aligned(2), may_alias));
typedef uint8_t vb __attribute__((vector_size(W), aligned(1), may_alias));
typedef int8_t vc __attribute__((vector_size(W), aligned(1), may_alias));
typedef int16_t vs __attribute__((vector_size(W * 4), aligned(2), may_alias));  // 2 W of them
typedef int8_t vt __attribute__((vector_size(W * 2), aligned(1), may_alias));   // 2 W of them
typedef float v4f __attribute__((vector_size(16), aligned(4), may_alias));

// Storage types, so that loads and stores overload on them.
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };
struct i8 { int8_t bits; };
struct i16 { int16_t bits; };

template <int N> struct Int { static constexpr int value = N; };
template <class T> struct Type { using type = T; };
template <class T> INLINE T min_of(T a, T b) { return a < b ? a : b; }
template <class T> INLINE T max_of(T a, T b) { return a > b ? a : b; }

INLINE vf splat(float x) { return x - (vf){}; }
INLINE vi splat_bits(int32_t x) { return x - (vi){}; }
INLINE vf max_of(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  vf r;
  for (int i = 0; i < W; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;
#endif
}

// acc = fma(a, b, acc), with all three in registers. Compilers left to choose fold the load of an
// operand into each of its uses, or overwrite the wrong one of the three and move it back; a tile
// that fills the sixteen registers then waits for loads rather than multiply-adds.
INLINE vf add_product(vf acc, vf a, vf b) {
#if defined(__FMA__) && !defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
#else
  return fma(a, b, acc);
#endif
}

// ---- widening loads: W values as f32

// W narrow integers as int32. Spelled out because GCC converts the vectors of half a register or
// less element by element.
INLINE vi widen(vh x) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, vi);
#endif
}
INLINE vi widen(vb x) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)x));
#else
  return __builtin_convertvector(x, vi);
#endif
}
INLINE vi widen(vc x) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32((__m128i)x);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)x));
#else
  return __builtin_convertvector(x, vi);
#endif
}
INLINE vf to_f32(vi x) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps((__m512i)x);
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps((__m256i)x);
#else
  return __builtin_convertvector(x, vf);
#endif
}

INLINE vf to_f32(vf x) { return x; }

// ---- pairs of 16-bit integers

INLINE vs load_shorts(const i16* p) { return *(const vs*)p; }
INLINE vs load_shorts(const i8* p) {
#if defined(__AVX512F__)
  return (vs)_mm512_cvtepi8_epi16((__m256i)*(const vt*)p);
#elif defined(__AVX2__)
  return (vs)_mm256_cvtepi8_epi16((__m128i)*(const vt*)p);
#else
  return __builtin_convertvector(*(const vt*)p, vs);
#endif
}
// x[2 i] y[2 i] + x[2 i + 1] y[2 i + 1] as int32, for W pairs.
INLINE vi sums_of_pairs(vs x, vs y) {
#if defined(__AVX512F__)
  return (vi)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#elif defined(__x86_64__)
  return (vi)_mm_madd_epi16((__m128i)x, (__m128i)y);
#else
  vi a = (vi)x, b = (vi)y;
  return (a >> 16) * (b >> 16) + (a << 16 >> 16) * (b << 16 >> 16);
#endif
}

INLINE vf load(const float* p) { return *(const vf*)p; }
INLINE vf load(const bf16* p) { return (vf)(widen(*(const vh*)p) << 16); }
INLINE vf f16_to_f32(vh h) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps((__m128i)h);
#else
  vi u = widen(h), magnitude = u & 0x7fff, sign = (u & 0x8000) << 16;
  // Below 2^-14 the exponent field is 0: put the mantissa under 2^-14 and take it away again,
  // so that no f32 subnormal appears (threads may flush those to zero).
  vf small = (vf)((magnitude << 13) + (113 << 23)) - splat(6.103515625e-05f);
  vi normal = (magnitude << 13) + (112 << 23);
  vi special = (magnitude << 13) | 0x7f800000;
  vi r = magnitude >= 0x7c00 ? special : magnitude < 0x400 ? (vi)small : normal;
  return (vf)(r | sign);
#endif
}
INLINE vf load(const f16* p) { return f16_to_f32(*(const vh*)p); }
INLINE vf load(const e5m2* p) {  // the upper byte of an f16
  vi u = widen(*(const vb*)p) << 8;
  return f16_to_f32(__builtin_convertvector(u, vh));
}
INLINE vf load(const e4m3* p) {
  vi u = widen(*(const vb*)p), magnitude = u & 0x7f;
  vf small = (vf)((magnitude << 20) + (121 << 23)) - splat(0.015625f);
  vi normal = (magnitude << 20) + (120 << 23);
  vi r = magnitude == 0x7f ? splat_bits(0x7fc00000) : magnitude < 8 ? (vi)small : normal;
  return (vf)(r | ((u & 0x80) << 24));
}
INLINE vf load(const i8* p) {
  return to_f32(widen(*(const vc*)p));
}

// Each element without its lower 16 bits. Where registers are scarce the mask comes from memory, as
// a value that compilers cannot see: they would build a constant anew for each use.
INLINE vf upper_halves(vi x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  alignas(32) static const int32_t values[W] = {-65536, -65536, -65536, -65536,
                                                -65536, -65536, -65536, -65536};
  const int32_t* mask = values;
  asm("" : "+r"(mask));
  return (vf)(x & *(const vi*)mask);
#else
  return (vf)(x & (int32_t)0xffff0000);
#endif
}

// One half (0 or 1) of 2 W values. bf16 comes as even and odd elements: a shift or a mask in place
// of a widening. Whatever meets it must be in the same order (see `pair` below).
template <int half, class T> INLINE vf load_half(const T* p) { return load(p + half * W); }
template <int half> INLINE vf load_half(const bf16* p) {
  vi x = *(const vi*)p;
  return half == 0 ? (vf)(x << 16) : upper_halves(x);
}

// ---- narrowing stores: round to nearest, ties to even

INLINE void store(float* p, vf v) { *(vf*)p = v; }
INLINE vh to_bf16(vf v) {
  vi b = (vi)v, r = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  vi nan = ((b >> 16) & 0x8000) | 0x7fc0;
  return __builtin_convertvector((v == v ? r : nan), vh);
}
INLINE void store(bf16* p, vf v) { *(vh*)p = to_bf16(v); }
INLINE void store(f16* p, vf v) {
#if defined(__AVX512F__)
  *(vh*)p = (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  *(vh*)p = (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  vi b = (vi)v, sign = (b >> 16) & 0x8000, u = b & 0x7fffffff;
  vi normal = (u - (112 << 23) + 0xfff + ((u >> 13) & 1)) >> 13;
  vi small = (vi)((vf)u + splat(0.5f)) - (126 << 23);  // ulp of 0.5 is 2^-24, f16's smallest
  vi r = u < (113 << 23) ? small : normal;
  r = u >= 0x477ff000 ? splat_bits(0x7c00) : r;
  r = u > 0x7f800000 ? splat_bits(0x7e00) : r;
  *(vh*)p = __builtin_convertvector(r | sign, vh);
#endif
}
// fp8 saturates to the largest finite value; NaN stays NaN.
INLINE void store(e4m3* p, vf v) {
  vi b = (vi)v, sign = (b >> 24) & 0x80, u = b & 0x7fffffff;
  vi limit = splat_bits(0x43e00000);  // 448
  vi c = u > limit ? limit : u;
  vi normal = (c - (120 << 23) + 0x7ffff + ((c >> 20) & 1)) >> 20;
  vi small = (vi)((vf)c + splat(16384.f)) - 0x46800000;  // ulp of 2^14 is 2^-9
  vi r = c < (121 << 23) ? small : normal;
  r = u > 0x7f800000 ? splat_bits(0x7f) : r;
  *(vb*)p = __builtin_convertvector(r | sign, vb);
}
INLINE void store(e5m2* p, vf v) {
  vi b = (vi)v, sign = (b >> 24) & 0x80, u = b & 0x7fffffff;
  vi limit = splat_bits(0x47600000);  // 57344
  vi c = u > limit ? limit : u;
  vi normal = (c - (112 << 23) + 0xfffff + ((c >> 21) & 1)) >> 21;
  vi small = (vi)((vf)c + splat(128.f)) - 0x43000000;  // ulp of 2^7 is 2^-16
  vi r = c < (113 << 23) ? small : normal;
  r = u > 0x7f800000 ? splat_bits(0x7e) : r;
  *(vb*)p = __builtin_convertvector(r | sign, vb);
}
INLINE void store(i8* p, vf v) {
  vf c = v > 127.f ? splat(127.f) : v < -128.f ? splat(-128.f) : v;
  c = v == v ? c : (vf){};
  vi r = (vi)(c + splat(12582912.f)) - 0x4b400000;  // 1.5 x 2^23: rounds to an integer
  *(vc*)p = __builtin_convertvector(r, vc);
}

// ---- functions

// x becomes exp(x), for x <= 0: relative error below 3e-7; below -87.3 as at -87.3. The steps of
// several vectors alternate, because one waits for another for longer than processors look ahead.
template <int N> INLINE void exponentiate(vf (&x)[N]) {
  const vf round = splat(12582912.f);  // 1.5 x 2^23: what is added becomes an integer
  vf t[N], p[N], z[N];
  for (int i = 0; i < N; i++) x[i] = max_of(x[i], splat(-87.3f));
  for (int i = 0; i < N; i++) t[i] = fma(x[i], splat(1.44269504f), round);
  for (int i = 0; i < N; i++) z[i] = t[i] - round;
  for (int i = 0; i < N; i++) x[i] = fma(z[i], splat(-0.693359375f), x[i]);
  for (int i = 0; i < N; i++) x[i] = fma(z[i], splat(2.12194440e-4f), x[i]);
  for (int i = 0; i < N; i++) z[i] = x[i] * x[i];
  // Least relative error of degree 5 on [-ln(2) / 2, ln(2) / 2].
  for (int i = 0; i < N; i++) p[i] = fma(x[i], splat(8.312501e-3f), splat(4.189033e-2f));
  for (int i = 0; i < N; i++)
    p[i] = fma(p[i], z[i], fma(x[i], splat(1.6667116e-1f), splat(4.999923e-1f)));
  for (int i = 0; i < N; i++) p[i] = fma(p[i], z[i], x[i] + 1.f);
  for (int i = 0; i < N; i++) x[i] = (vf)((vi)p[i] + ((vi)t[i] << 23));
}
INLINE vf exp_of(vf x) {
  vf y[1] = {x};
  exponentiate(y);
  return y[0];
}
INLINE float exp_of(float x) { return exp_of(splat(x))[0]; }

INLINE vf tanh_of(vf x) {
  vf a = (vf)((vi)x & 0x7fffffff), z = x * x;
  vf p = splat(-5.70498872745e-3f);  // Cephes tanhf, |x| < 0.625
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  vf near = fma(p * z, x, x);
  vf e = exp_of(a * -2.f), far = (1.f - e) / (1.f + e);
  far = (vf)((vi)far | ((vi)x & (int32_t)0x80000000));
  return a < 0.625f ? near : far;
}

INLINE float max_across(vf v) {
  v4f x = (v4f){v[0], v[1], v[2], v[3]};
  for (int i = 4; i < W; i += 4) {
    v4f y = (v4f){v[i], v[i + 1], v[i + 2], v[i + 3]};
    x = x > y ? x : y;
  }
  return max_of(max_of((float)x[0], (float)x[1]), max_of((float)x[2], (float)x[3]));
}
INLINE float sum_across(vf v) {
  float s = v[0];
  for (int i = 1; i < W; i++) s += v[i];
  return s;
}

// Elements 0, 2, 4 ... (odd = 0) or 1, 3, 5 ... of the 2 W of a and b.
template <int odd> INLINE vf every_second(vf a, vf b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256 x = _mm256_shuffle_ps((__m256)a, (__m256)b, odd ? 0xdd : 0x88);
  return (vf)_mm256_permute4x64_epi64((__m256i)x, 0xd8);
#else
  vf r;
  for (int i = 0; i < W / 2; i++) r[i] = a[2 * i + odd], r[i + W / 2] = b[2 * i + odd];
  return r;
#endif
}

// Adds neighbours inside each 128-bit lane: [a0+a1, a2+a3, b0+b1, b2+b3].
INLINE vf add_pairs(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88) +
         (vf)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xdd);
#elif defined(__AVX2__)
  return (vf)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88) +
         (vf)_mm256_shuffle_ps((__m256)a, (__m256)b, 0xdd);
#elif defined(__x86_64__)
  return (vf)_mm_shuffle_ps((__m128)a, (__m128)b, 0x88) +
         (vf)_mm_shuffle_ps((__m128)a, (__m128)b, 0xdd);
#else
  return (vf){a[0], a[2], b[0], b[2]} + (vf){a[1], a[3], b[1], b[3]};
#endif
}
// The sums of four vectors. Each sum has the same order of additions wherever it is taken.
INLINE v4f sum4(vf a, vf b, vf c, vf d) {
  vf x = add_pairs(add_pairs(a, b), add_pairs(c, d));
#if defined(__AVX512F__)
  __m512 y = (__m512)x;
  return (v4f)_mm512_castps512_ps128(y) + (v4f)_mm512_extractf32x4_ps(y, 1) +
         ((v4f)_mm512_extractf32x4_ps(y, 2) + (v4f)_mm512_extractf32x4_ps(y, 3));
#elif defined(__AVX2__)
  return (v4f)_mm256_castps256_ps128((__m256)x) + (v4f)_mm256_extractf128_ps((__m256)x, 1);
#else
  return (v4f)x;
#endif
}

INLINE void transpose(v4f (&x)[4]) {
#if defined(__x86_64__)
  __m128 a = (__m128)x[0], b = (__m128)x[1], c = (__m128)x[2], d = (__m128)x[3];
  _MM_TRANSPOSE4_PS(a, b, c, d);
  x[0] = (v4f)a, x[1] = (v4f)b, x[2] = (v4f)c, x[3] = (v4f)d;
#else
  v4f y[4];
  for (int i = 0; i < 4; i++) y[i] = (v4f){x[0][i], x[1][i], x[2][i], x[3][i]};
  for (int i = 0; i < 4; i++) x[i] = y[i];
#endif
}

// Copies n values (a multiple of W) to f32 in the order of the halves.
template <class T> INLINE void widen(const T* src, int64_t n, float* dst) {
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    store(dst + i, load_half<0>(src + i));
    store(dst + i + W, load_half<1>(src + i));
  }
  if (i < n) store(dst + i, load(src + i));
}
// Copies n values (a multiple of W) as f32 from their own order to that of the halves, and back.
template <class T>
INLINE void pair(const T* __restrict src, int64_t n, float* __restrict dst) {
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    vf x = load(src + i), y = load(src + i + W);
    store(dst + i, every_second<0>(x, y));
    store(dst + i + W, every_second<1>(x, y));
  }
  if (i < n) store(dst + i, load(src + i));
}
INLINE void pair(const bf16* __restrict src, int64_t n, float* __restrict dst) {
  widen(src, n, dst);
}
INLINE void unpair(const float* __restrict src, int64_t n, float* __restrict dst) {
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W)
    for (int j = 0; j < W; j++) dst[i + 2 * j] = src[i + j], dst[i + 2 * j + 1] = src[i + W + j];
  if (i < n) store(dst + i, load(src + i));
}

// Calls f(Type<T>()) with the storage type of a dtype.
template <class F> INLINE void for_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case F32: return f(Type<float>());
    case BF16: return f(Type<bf16>());
    case F16: return f(Type<f16>());
    case F8_E4M3: return f(Type<e4m3>());
    case F8_E5M2: return f(Type<e5m2>());
    case I8: return f(Type<i8>());
  }
}

// Calls f(Int<rows>, first row) over groups of at most kMaxRows rows of about equal size.
template <class F> INLINE void for_row_groups(int rows, const F& f) {
  for (int r = 0; r < rows;) {
    int left = rows - r;
    int size = left <= kMaxRows ? left : left < 2 * kMaxRows ? (left + 1) / 2 : kMaxRows;
    switch (size) {
      case 1: f(Int<1>(), r); break;
      case 2: f(Int<2>(), r); break;
#if defined(__AVX512F__)
      case 3: f(Int<3>(), r); break;
      default: f(Int<4>(), r); break;
#else
      default: f(Int<3>(), r); break;
#endif
    }
    r += size;
  }
}

}  // namespace ISA_NS
}  // namespace cpu_kernels
