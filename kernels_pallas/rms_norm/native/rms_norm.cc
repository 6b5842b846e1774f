// Root-mean-square normalisation of rows on a CPU, called by XLA through its foreign function interface.
//
// A row's squares are summed in kLanes chains whose order depends on the row's length alone, so that a row has the
// same bits in a call of any number of rows.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kNumbersPerThread = 1 << 15;  // fewer cost more to share out than they save

using Row = ffi::Buffer<ffi::F32, 1>;

float widen(float x) { return x; }
float widen(uint16_t x) { return kernel::from_bfloat16(x); }
void narrow(float x, float* to) { *to = x; }
void narrow(float x, uint16_t* to) { *to = kernel::to_bfloat16(x); }

template <typename T>
void normalise(const T* x, const float* weight, float eps, int64_t size, T* out) {
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const float value = widen(x[i + j]);
      sums[j] += value * value;
    }
  }
  for (int64_t j = 0; i + j < size; ++j) {
    const float value = widen(x[i + j]);
    sums[j] += value * value;
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  const float scale = 1 / std::sqrt(sums[0] / static_cast<float>(size) + eps);
  for (i = 0; i < size; ++i) narrow(widen(x[i]) * scale * weight[i], out + i);
}

ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, Row weight, float eps, ffi::Result<ffi::AnyBuffer> out) {
  const ffi::DataType type = x.element_type();
  if (type != ffi::F32 && type != ffi::BF16) {
    return ffi::Error::InvalidArgument("rms_norm: rows must be float32 or bfloat16");
  }
  const int64_t size = weight.dimensions()[0], rows = static_cast<int64_t>(x.element_count()) / size;
  const int64_t threads =
      std::clamp<int64_t>(rows * size / kNumbersPerThread, 1, std::max<int64_t>(1, pool.num_threads()));
  const float* w = weight.typed_data();
  kernel::parallel_for(pool, threads, threads, [&](int64_t part, int64_t) {
    for (int64_t r = part * rows / threads; r < (part + 1) * rows / threads; ++r) {
      if (type == ffi::F32) {
        normalise(static_cast<const float*>(x.untyped_data()) + r * size, w, eps, size,
                  static_cast<float*>(out->untyped_data()) + r * size);
      } else {
        normalise(static_cast<const uint16_t*>(x.untyped_data()) + r * size, w, eps, size,
                  static_cast<uint16_t*>(out->untyped_data()) + r * size);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RmsNorm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Row>()
                                  .Attr<float>("eps")
                                  .Ret<ffi::AnyBuffer>());
