// The soft cross entropy of rows of logits against rows of a law, with its gradient and two figures of the same
// numbers, on a CPU, called by XLA through its foreign function interface.
//
// XLA:CPU makes a pass over all rows of each sum and of the gradient, from memory; here a row is read from memory
// once and stays in a second-level cache for the passes that follow.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "exponential.h"
#include "kernel.h"
#include "level.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using kernel::broadcast;
using kernel::Floats;
using kernel::kLanes;
using kernel::load;

constexpr int64_t kNumbersPerThread = 1 << 16;  // fewer cost more to share out than they save
constexpr int64_t kChunksPerThread = 8;

using Rows = ffi::Buffer<ffi::F32, 2>;
using Row = ffi::Buffer<ffi::F32, 1>;
using Ids = ffi::Buffer<ffi::S32, 1>;

// Numbers of a row in whole registers, the last filled up.
Floats load(const float* row, int64_t at, int64_t size, float filling) {
  if (at + kLanes <= size) return kernel::load(row + at);
  float rest[kLanes];
  for (int i = 0; i < kLanes; ++i) rest[i] = at + i < size ? row[at + i] : filling;
  return kernel::load(rest);
}

void store(float* row, int64_t at, int64_t size, Floats value) {
  float numbers[kLanes];
  kernel::store(numbers, value);
  std::memcpy(row + at, numbers, std::min<int64_t>(kLanes, size - at) * sizeof(float));
}

void store(uint16_t* row, int64_t at, int64_t size, Floats value) {
  float numbers[kLanes];
  kernel::store(numbers, value);
  uint16_t rounded[kLanes];
  for (int i = 0; i < kLanes; ++i) rounded[i] = kernel::to_bfloat16(numbers[i]);
  std::memcpy(row + at, rounded, std::min<int64_t>(kLanes, size - at) * sizeof(uint16_t));
}

struct Figures {
  float entropy, accept;
  int32_t best;
};

template <typename Out>
Figures row(const float* logits, const float* log_p, float inside, int64_t size, float* exponentials, float* law,
            Out* gradient) {
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  Floats tops = broadcast(lowest);
  for (int64_t i = 0; i < size; i += kLanes) tops = kernel::larger(tops, load(logits, i, size, lowest));
  const float top = kernel::largest(tops);
  int64_t best = 0;
  while (best + 1 < size && logits[best] != top) ++best;

  // What is behind the row has no probability: its exponentials are zeros, which meet no infinity.
  Floats sums = broadcast(0.f), masses = sums, products = sums;
  for (int64_t i = 0; i < size; i += kLanes) {
    const uint32_t there = size - i >= kLanes ? (1u << kLanes) - 1 : (1u << (size - i)) - 1;
    const Floats none = broadcast(0.f);
    const Floats x = kernel::choose(there, load(logits, i, size, lowest) - broadcast(top), none);
    const Floats e = kernel::choose(there, kernel::exponential(x), none);
    const Floats p = kernel::exponential(load(log_p, i, size, lowest));
    kernel::store(exponentials + i, e);
    kernel::store(law + i, p);
    sums += e;
    masses += p;
    products = kernel::multiply_add(p, x, products);
  }
  const float sum = kernel::sum_lanes(sums), mass = kernel::sum_lanes(masses);
  const Floats share = broadcast(1 / sum), whole = broadcast(mass), reach = broadcast(inside);
  Floats kept = broadcast(0.f);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats q = load(exponentials + i) * share, p = load(law + i);
    kept += kernel::smaller(p * reach, q);
    store(gradient, i, size, kernel::multiply_add(q, whole, -p));
  }
  return {mass * std::log(sum) - kernel::sum_lanes(products), kernel::sum_lanes(kept), static_cast<int32_t>(best)};
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
  kernel::parallel_for(pool, threads, chunks, [&](int64_t chunk, int64_t) {
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
