// Writes of new tokens into a cache on a CPU, called by XLA through its foreign function interface.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Starts = ffi::Buffer<ffi::S32, 1>;

// Puts fresh [B, H, N, ...] into a cache [B, H, S, ...] at slots starts[b] + (0 .. N-1), in place.
ffi::Error cache_write(ffi::AnyBuffer cached, ffi::AnyBuffer fresh, Starts starts, ffi::Result<ffi::AnyBuffer> out) {
  const auto shape = cached.dimensions(), given = fresh.dimensions();
  const int64_t slots = shape[2], count = given[2];
  if (fresh.element_type() != cached.element_type()) {
    return ffi::Error::InvalidArgument("cache_write: the tokens are not of the cache's dtype");
  }
  if (count > slots) return ffi::Error::InvalidArgument("cache_write: more tokens than slots");
  int64_t bytes = ffi::ByteWidth(cached.element_type());
  for (size_t i = 3; i < shape.size(); ++i) bytes *= shape[i];
  auto* to = static_cast<char*>(out->untyped_data());
  if (to != cached.untyped_data()) std::memcpy(to, cached.untyped_data(), cached.size_bytes());
  const auto* from = static_cast<const char*>(fresh.untyped_data());
  for (int64_t b = 0; b < shape[0]; ++b) {
    // A start past the end is moved back, as dynamic_update_slice does.
    const int64_t start = std::clamp<int64_t>(starts.typed_data()[b], 0, slots - count);
    for (int64_t h = 0; h < shape[1]; ++h) {
      const int64_t head = b * shape[1] + h;
      std::memcpy(to + (head * slots + start) * bytes, from + head * count * bytes, count * bytes);
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CacheWrite, cache_write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Starts>()
                                  .Ret<ffi::AnyBuffer>());
