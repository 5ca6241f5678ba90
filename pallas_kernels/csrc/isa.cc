// The kernels of one instruction set. Compiled once per set, with ISA_NS naming it.
#include "attention.h"
#include "linear.h"

namespace cpu_kernels {
namespace ISA_NS {

template <class S, class D>
INLINE void convert_row(const void* src, void* dst, int64_t n, float scale) {
  const S* s = (const S*)src;
  D* d = (D*)dst;
  int64_t i = 0;
  for (; i + W <= n; i += W) store(d + i, load(s + i) / scale);
  if (i < n) {
    S from[W];
    D to[W];
    memset((void*)from, 0, sizeof from);
    memcpy((void*)from, (const void*)(s + i), sizeof(S) * (n - i));
    store(to, load(from) / scale);
    memcpy((void*)(d + i), (const void*)to, sizeof(D) * (n - i));
  }
}
template <class S>
INLINE void convert_from(const void* src, void* dst, Dtype dst_dtype, int64_t n, float scale) {
  switch (dst_dtype) {
    case F32: return convert_row<S, float>(src, dst, n, scale);
    case BF16: return convert_row<S, bf16>(src, dst, n, scale);
    case F16: return convert_row<S, f16>(src, dst, n, scale);
    case F8_E4M3: return convert_row<S, e4m3>(src, dst, n, scale);
    case F8_E5M2: return convert_row<S, e5m2>(src, dst, n, scale);
    case I8: return convert_row<S, i8>(src, dst, n, scale);
  }
}
static void convert(const void* src, Dtype src_dtype, void* dst, Dtype dst_dtype, int64_t n,
                    float scale) {
  if (src_dtype == F32) return convert_from<float>(src, dst, dst_dtype, n, scale);
  if (src_dtype == BF16) return convert_from<bf16>(src, dst, dst_dtype, n, scale);
  if (src_dtype == F16) return convert_from<f16>(src, dst, dst_dtype, n, scale);
}

#define STRING(x) #x
#define NAME(x) STRING(x)

const Kernels& kernels() {
  static constexpr Kernels table = {
      NAME(ISA_NS), scratch_floats,  attend,     merge,     convert,
      linear_k_padded, packed_bytes, pack_rows,  linear,
  };
  return table;
}

}  // namespace ISA_NS
}  // namespace cpu_kernels
