// e^x of a register of float32.

#ifndef KERNELS_PALLAS_EXPONENTIAL_H_
#define KERNELS_PALLAS_EXPONENTIAL_H_

#include "level.h"

namespace kernel {

// y times 2^n for whole n of -160 to 0.
inline Floats times_power(Floats y, Floats n) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(y, n);
#else
  // Two powers, as one of them would be no normal number.
  const IntLanes all = __builtin_convertvector(n, IntLanes), half = all >> 1;
  return y * (Floats)((half + 127) << 23) * (Floats)((all - half + 127) << 23);
#endif
}

// For x <= 0: 2^n times a polynomial of what is left, which is at most half of ln 2. Below -110 float32 has zero
// alone, for minus infinity too; a nan stays one.
inline Floats exponential(Floats x) {
  x = larger(broadcast(-110.f), x);
  const Floats whole = broadcast(12582912.f);  // added and taken off, it leaves the nearest whole number
  const Floats n = (x * broadcast(1.44269504088896341f) + whole) - whole;
  Floats r = multiply_add(-n, broadcast(0.693359375f), x);
  r = multiply_add(-n, broadcast(-2.12194440e-4f), r);
  Floats y = broadcast(1.f / 5040);
  for (float term : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) {
    y = multiply_add(y, r, broadcast(term));
  }
  return times_power(y, n);
}

}  // namespace kernel

#endif  // KERNELS_PALLAS_EXPONENTIAL_H_
