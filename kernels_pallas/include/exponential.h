// e^x of a register of float32.

#ifndef KERNELS_PALLAS_EXPONENTIAL_H_
#define KERNELS_PALLAS_EXPONENTIAL_H_

#include <immintrin.h>

namespace kernel {

#if defined(__AVX512F__)
// For x <= 0: 2^n times a polynomial of what is left, which is at most half of ln 2. Below -110 float32 has zero
// alone, for minus infinity too; a nan stays one.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-110.f), x);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.f / 5040);
  for (float term : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) {
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(term));
  }
  return _mm512_scalef_ps(y, n);
}
#endif

}  // namespace kernel

#endif  // KERNELS_PALLAS_EXPONENTIAL_H_
