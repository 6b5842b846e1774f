// x @ w.T for w in blocks of 2 to 8 bits with scales of their own, as GGUF files hold them, on a CPU; called by XLA
// through its foreign function interface. forms.py says how the numbers lie.
//
// 16 output columns, a tile, lie together, and of a tile everything lies in the order in which it is read: a thread goes
// through its tiles from the first byte to the last. A step of 256 numbers a column is unpacked once, into a panel that
// stays in the first-level cache, and is multiplied by all rows of x, a few at a time.
//
// With integers, x is rounded to 8 bits with a scale for each 32 numbers. Sums over a group (the 16 or 32 numbers of w
// that share a scale) are exact integers; they are multiplied by both scales and added in float32, group after group:
//   VNNI, Arm dot products      four products of bytes in one instruction
//   AVX2, AVX-512               products of bytes, two of which are added in 16 bits. Numbers of up to 6 bits are centred,
//                               so that a group's sum ends within 16 bits: it begins with what takes the centre off
//                               again, and what it passes over on the way is lost and won again. Numbers of 8 bits are
//                               two nibbles.
//   else                        numbers widened to 16 bits, whose products are added in pairs
// Without, a panel holds w itself in float32, to the bit what the file means, for float32 multiply-adds; sums of 32 are
// chains of their own, which are added in order.
//
// A row's result depends neither on the other rows nor on which thread computes what.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "block_integers.h"
#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Blocks = ffi::Buffer<ffi::U8, 3>;
using Sizes = ffi::Buffer<ffi::S32, 1>;

// ---- floats ----

// Adds what R rows of x [K, R] make of J groups of 32 of w [J, 32, kTile] to totals [R, kTile].
template <int R, int J>
inline void multiply_floats(const float* panel, const float* x, float* totals) {
  constexpr int V = kernel::vectors_of<R>() < kVectors ? kernel::vectors_of<R>() : kVectors;
  for (int c = 0; c < kTile; c += V * kLanes) {
    Floats sums[J][R][V];
    KERNEL_UNROLL
    for (int j = 0; j < J; ++j) {
      KERNEL_UNROLL
      for (int r = 0; r < R; ++r) {
        KERNEL_UNROLL
        for (int v = 0; v < V; ++v) sums[j][r][v] = broadcast(0.0f);
      }
    }
    for (int i = 0; i < kGroup; ++i) {
      KERNEL_UNROLL
      for (int j = 0; j < J; ++j) {
        const float* w = panel + (j * kGroup + i) * kTile + c;
        KERNEL_UNROLL
        for (int r = 0; r < R; ++r) {
          const Floats number = broadcast(x[(j * kGroup + i) * R + r]);
          KERNEL_UNROLL
          for (int v = 0; v < V; ++v) sums[j][r][v] = multiply_add(load(w + v * kLanes), number, sums[j][r][v]);
        }
      }
    }
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
      KERNEL_UNROLL
      for (int v = 0; v < V; ++v) {
        float* at = totals + r * kTile + c + v * kLanes;
        Floats total = load(at);
        KERNEL_UNROLL
        for (int j = 0; j < J; ++j) total += sums[j][r][v];
        store(at, total);
      }
    }
  }
}

struct FloatProduct {
  static constexpr int64_t kPanelBytes = int64_t{kStepGroups} * kGroup * kTile * sizeof(float);
  const Problem& p;
  float* x;

  explicit FloatProduct(const Problem& problem) : p(problem), x(kernel::scratch<0>(p.rows * p.k)) {}
  void prepare(const float* from, int64_t first, int64_t size, int64_t r) const {
    float* to = x + first * p.k + r;
    for (int64_t i = 0; i < p.k; ++i) to[i * size] = from[i];
  }
  __attribute__((noinline)) void step(const uint8_t* tile, int64_t first, int64_t last, void* panel, Scales& scales,
                                      float* totals) const {
    float* numbers = static_cast<float*>(panel);
    const int per_group = kGroup / p.form.group;
    for_step(p.form, tile, first, last, scales, [](int64_t, const uint8_t*) {});
    const int groups = p.form.unit / kGroup;
    for (int64_t g = first; g < last; ++g) {
      const uint8_t* packed = tile + g / groups * p.form.unit_bytes() + g % groups * p.form.packed_group();
      float* to = numbers + (g - first) * kGroup * kTile;
      const auto put = [&](int q, int v, Ints quads) {
        const int64_t scaled = (g - first) * per_group + q * 4 / p.form.group;
        const Floats scale = load(scales.scale[scaled] + v * kLanes), shift = load(scales.shift[scaled] + v * kLanes);
        KERNEL_UNROLL
        for (int i = 0; i < 4; ++i) {
          const Floats number = kernel::to_floats((Ints)(((IntLanes)quads >> 8 * i) & 0xff));
          store(to + (4 * q + i) * kTile + v * kLanes, multiply_add(number, scale, shift));
        }
      };
      if (p.form.width() == 8) {
        unpack_wide(p.form, packed, put);
      } else {
        unpack_narrow(p.form, packed, put);
      }
    }
    kernel::for_row_blocks(p.rows, [&](auto size, int64_t row) {
      constexpr int R = size, J = R == 1 ? 4 : R <= 3 ? 2 : 1;
      const float* from = x + row * p.k + first * kGroup * R;
      int64_t g = 0;
      for (; g + J <= last - first; g += J) {
        multiply_floats<R, J>(numbers + g * kGroup * kTile, from + g * kGroup * R, totals + row * kTile);
      }
      for (; g < last - first; ++g) {
        multiply_floats<R, 1>(numbers + g * kGroup * kTile, from + g * kGroup * R, totals + row * kTile);
      }
    });
  }
};

// ---- the call ----

template <class Product, typename Pool, typename T>
void multiply(Pool& pool, const Problem& p, const T* x) {
  if (p.rows == 0) return;
  const Product product(p);
  const int64_t tiles = p.tiles(), bytes = tiles * p.tile_bytes();
  const int64_t worth = std::max<int64_t>(1, bytes * ceil_div(p.rows, kernel::kMostRows) / kernel::kBytesPerThread);
  const int64_t threads = std::min({worth, tiles, std::max<int64_t>(1, pool.num_threads())});
  const auto prepare = [&](int64_t first_row, int64_t last_row) {
    kernel::for_row_blocks(p.rows, [&](auto size, int64_t first) {
      for (int64_t r = 0; r < size; ++r) {
        if (first + r < first_row || first + r >= last_row) continue;
        const T* from = x + (first + r) * p.k;
        float* wide = kernel::scratch<1>(p.k);
        for (int64_t i = 0; i < p.k; ++i) {
          if constexpr (sizeof(T) == 2) {
            wide[i] = kernel::from_bfloat16(from[i]);
          } else {
            wide[i] = from[i];
          }
        }
        product.prepare(wide, first, size, r);
      }
    });
  };
  const int64_t shares = std::clamp<int64_t>(p.rows * p.k / (1 << 15), 1, threads);
  kernel::parallel_for(pool, shares, shares, [&](int64_t share, int64_t) {
    prepare(share * p.rows / shares, (share + 1) * p.rows / shares);
  });
  const int64_t chunks = threads == 1 ? 1 : std::min(tiles, threads * kChunksPerThread);
  const int64_t groups = p.k / kGroup, step = kStepGroups;
  const int64_t step_bytes = step * kGroup / p.form.unit * p.form.unit_bytes();
  kernel::parallel_for(pool, threads, chunks, [&](int64_t chunk, int64_t) {
    const int64_t panel_size = Product::kPanelBytes / sizeof(float);
    float* memory = kernel::scratch<2>(panel_size + p.rows * kTile + 16);
    float* panel = memory + (-reinterpret_cast<uintptr_t>(memory) % 64) / sizeof(float);
    float* totals = panel + panel_size;
    Scales scales;
    for (int64_t t = chunk * tiles / chunks; t < (chunk + 1) * tiles / chunks; ++t) {
      const uint8_t* tile = p.w + t * p.tile_bytes();
      std::fill_n(totals, p.rows * kTile, 0.0f);
      for (int64_t g = 0; g < groups; g += step) {
        const int64_t ahead = t * p.tile_bytes() + (g + step) * kGroup / p.form.unit * p.form.unit_bytes();
        const int64_t until = std::min(ahead + step_bytes, bytes);
        for (int64_t at = ahead; at < until; at += 64) kernel::prefetch(p.w + at);
        product.step(tile, g, std::min(g + step, groups), panel, scales, totals);
      }
      const int64_t there = std::min<int64_t>(kTile, p.columns - t * kTile);
      for (int64_t r = 0; r < p.rows; ++r) {
        const int64_t at = r * p.columns + t * kTile;
        if (!p.out_bfloat16) {
          std::memcpy(static_cast<float*>(p.out) + at, totals + r * kTile, there * sizeof(float));
          continue;
        }
        for (int64_t c = 0; c < there; ++c) {
          static_cast<uint16_t*>(p.out)[at + c] = kernel::to_bfloat16(totals[r * kTile + c]);
        }
      }
    }
  });
}

template <typename Pool, typename T>
void multiply(Pool& pool, const Problem& p, const T* x, bool integers) {
  if (!integers) {
    multiply<FloatProduct>(pool, p, x);
  } else if (p.form.width() == 8) {
    multiply<IntegerProduct<true>>(pool, p, x);
  } else {
    multiply<IntegerProduct<false>>(pool, p, x);
  }
}

// The rows of x lie in the order of the matrices of w that they meet, sizes[e] of them the e-th.
ffi::Error block_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, Blocks w, Sizes sizes, ffi::Result<ffi::AnyBuffer> out,
                        int64_t bits, int64_t group, int64_t unit, bool mins, bool codebook, bool integers) {
  const ffi::DataType type = x.element_type(), out_type = out->element_type();
  if (type != ffi::BF16 && type != ffi::F32) {
    return ffi::Error::InvalidArgument("block_matmul: x must be bfloat16 or float32");
  }
  if (out_type != ffi::BF16 && out_type != ffi::F32) {
    return ffi::Error::InvalidArgument("block_matmul: the result must be bfloat16 or float32");
  }
  const int64_t rows = x.dimensions()[0], matrices = w.dimensions()[0];
  const int64_t x_bytes = type == ffi::BF16 ? 2 : 4, out_bytes = out_type == ffi::BF16 ? 2 : 4;
  Problem p;
  p.form = {static_cast<int>(bits), static_cast<int>(group), static_cast<int>(unit), mins, codebook};
  p.k = x.dimensions()[1];
  p.columns = out->dimensions()[1];
  p.out_bfloat16 = out_type == ffi::BF16;
  if (w.dimensions()[1] != p.tiles() || w.dimensions()[2] != p.tile_bytes() || p.k % unit != 0) {
    return ffi::Error::InvalidArgument("block_matmul: w does not have the size that its form and the result ask for");
  }
  if (p.form.width() == 8 && group != kGroup) {
    return ffi::Error::InvalidArgument("block_matmul: numbers of 8 bits have scales for 32 of them");
  }
  int64_t row = 0;
  for (int64_t e = 0; e < matrices; ++e) {
    p.rows = matrices == 1 ? rows : std::clamp<int64_t>(sizes.typed_data()[e], 0, rows - row);
    p.w = w.typed_data() + e * p.tiles() * p.tile_bytes();
    p.out = static_cast<char*>(out->untyped_data()) + row * p.columns * out_bytes;
    const char* own = static_cast<const char*>(x.untyped_data()) + row * p.k * x_bytes;
    if (type == ffi::BF16) {
      multiply(pool, p, reinterpret_cast<const uint16_t*>(own), integers);
    } else {
      multiply(pool, p, reinterpret_cast<const float*>(own), integers);
    }
    row += p.rows;
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(BlockMatmul, block_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Blocks>()
                                  .Arg<Sizes>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("unit")
                                  .Attr<bool>("mins")
                                  .Attr<bool>("codebook")
                                  .Attr<bool>("integers"));
