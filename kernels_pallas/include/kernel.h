// What the C++ kernels share: bfloat16, and work spread over XLA's thread pool.

#ifndef KERNELS_PALLAS_KERNEL_H_
#define KERNELS_PALLAS_KERNEL_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace kernel {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Rounds to the nearest, ties to even; a nan stays one.
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t nan = (bits >> 16) | 0x40;
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(value != value ? nan : rounded);
}

constexpr int kPausesBeforeSleep = 4000;

// Calls body(0, next) ... body(count - 1, next), the caller and up to threads - 1 threads of the pool taking them in
// turn; next is the index that the thread has taken already to do after this one, or count.
// The caller never waits for a task that has not begun, so that callers who are themselves on the pool's threads
// cannot wait for each other.
template <typename Pool, typename Body>
void parallel_for(Pool& pool, int64_t threads, int64_t count, const Body& body) {
  struct Shared {
    const Body* body;
    int64_t count;
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable finished;
    void work() {
      for (int64_t i = next.fetch_add(1), after; i < count; i = after) {
        after = next.fetch_add(1);
        (*body)(i, std::min(after, count));
        if (done.fetch_add(1) + 1 == count) {
          std::lock_guard<std::mutex> lock(mutex);
          finished.notify_all();
        }
      }
    }
  };
  const auto shared = std::make_shared<Shared>();
  shared->body = &body;
  shared->count = count;
  for (int64_t t = 1; t < threads; ++t) pool.Schedule([shared] { shared->work(); });
  shared->work();
  // What is left is under way; it mostly ends sooner than a sleeper wakes.
  for (int i = 0; i < kPausesBeforeSleep && shared->done.load() < count; ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->finished.wait(lock, [&] { return shared->done.load() == count; });
}

}  // namespace kernel

#endif  // KERNELS_PALLAS_KERNEL_H_
