// The soft cross entropy of rows of logits against rows of a law, with its gradient and two figures of the same
// numbers, on a CPU, called by XLA through its foreign function interface.
//
// XLA:CPU makes a pass over all rows of each sum and of the gradient, from memory; here a row is read from memory
// once and stays in a second-level cache for the passes that follow.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "exponential.h"
#include "kernel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kNumbersPerThread = 1 << 16;  // fewer cost more to share out than they save
constexpr int64_t kChunksPerThread = 8;

using Rows = ffi::Buffer<ffi::F32, 2>;
using Row = ffi::Buffer<ffi::F32, 1>;
using Ids = ffi::Buffer<ffi::S32, 1>;

__mmask16 lanes(int64_t left) { return left >= kLanes ? 0xffff : static_cast<__mmask16>((1u << left) - 1); }

void store(float* to, __mmask16 mask, __m512 value) { _mm512_mask_storeu_ps(to, mask, value); }

// Rounds to the nearest, ties to even; a nan stays one.
void store(uint16_t* to, __mmask16 mask, __m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                                  _mm512_set1_epi32(0x7fc00000));
  _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

struct Figures {
  float entropy, accept;
  int32_t best;
};

template <typename Out>
Figures row(const float* logits, const float* log_p, float inside, int64_t size, float* exponentials, float* law,
            Out* gradient) {
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 tops = lowest;
  for (int64_t i = 0; i < size; i += kLanes) {
    tops = _mm512_max_ps(tops, _mm512_mask_loadu_ps(lowest, lanes(size - i), logits + i));
  }
  const float top = _mm512_reduce_max_ps(tops);
  int64_t best = 0;
  while (best + 1 < size && logits[best] != top) ++best;

  __m512 sums = _mm512_setzero_ps(), masses = sums, products = sums;
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 mask = lanes(size - i);
    const __m512 x = _mm512_maskz_sub_ps(mask, _mm512_maskz_loadu_ps(mask, logits + i), _mm512_set1_ps(top));
    const __m512 e = _mm512_maskz_mov_ps(mask, kernel::exponential(x));
    const __m512 p = _mm512_maskz_mov_ps(mask, kernel::exponential(_mm512_maskz_loadu_ps(mask, log_p + i)));
    _mm512_storeu_ps(exponentials + i, e);
    _mm512_storeu_ps(law + i, p);
    sums = _mm512_add_ps(sums, e);
    masses = _mm512_add_ps(masses, p);
    products = _mm512_fmadd_ps(p, x, products);
  }
  const float sum = _mm512_reduce_add_ps(sums), mass = _mm512_reduce_add_ps(masses);
  const __m512 share = _mm512_set1_ps(1 / sum), whole = _mm512_set1_ps(mass), reach = _mm512_set1_ps(inside);
  __m512 kept = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += kLanes) {
    const __m512 q = _mm512_mul_ps(_mm512_loadu_ps(exponentials + i), share), p = _mm512_loadu_ps(law + i);
    kept = _mm512_add_ps(kept, _mm512_min_ps(_mm512_mul_ps(p, reach), q));
    store(gradient + i, lanes(size - i), _mm512_fmsub_ps(q, whole, p));
  }
  return {mass * std::log(sum) - _mm512_reduce_add_ps(products), _mm512_reduce_add_ps(kept),
          static_cast<int32_t>(best)};
}

ffi::Error soft_cross_entropy(ffi::ThreadPool pool, Rows logits, Rows log_p, Row inside, ffi::Result<Row> entropy,
                              ffi::Result<Row> accept, ffi::Result<Ids> best,
                              ffi::Result<ffi::AnyBuffer> gradient) {
  const int64_t rows = logits.dimensions()[0], size = logits.dimensions()[1];
  const ffi::DataType type = gradient->element_type();
  if (type != ffi::F32 && type != ffi::BF16) {
    return ffi::Error::InvalidArgument("soft_cross_entropy: the gradient must be float32 or bfloat16");
  }
  const int64_t threads =
      std::clamp<int64_t>(rows * size / kNumbersPerThread, 1, std::max<int64_t>(1, pool.num_threads()));
  const int64_t chunks = threads == 1 ? 1 : std::min(rows, threads * kChunksPerThread);
  kernel::parallel_for(pool, threads, chunks, [&](int64_t chunk) {
    thread_local std::vector<float> scratch;
    const int64_t padded = kernel::ceil_div(size, kLanes) * kLanes;
    scratch.resize(2 * padded);
    for (int64_t r = chunk * rows / chunks; r < (chunk + 1) * rows / chunks; ++r) {
      const float *own = logits.typed_data() + r * size, *law = log_p.typed_data() + r * size;
      const float reach = inside.typed_data()[r];
      float *first = scratch.data(), *second = scratch.data() + padded;
      const Figures found =
          type == ffi::F32
              ? row(own, law, reach, size, first, second, static_cast<float*>(gradient->untyped_data()) + r * size)
              : row(own, law, reach, size, first, second,
                    static_cast<uint16_t*>(gradient->untyped_data()) + r * size);
      entropy->typed_data()[r] = found.entropy;
      accept->typed_data()[r] = found.accept;
      best->typed_data()[r] = found.best;
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftCrossEntropy, soft_cross_entropy,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Rows>()
                                  .Arg<Rows>()
                                  .Arg<Row>()
                                  .Ret<Row>()
                                  .Ret<Row>()
                                  .Ret<Ids>()
                                  .Ret<ffi::AnyBuffer>());
