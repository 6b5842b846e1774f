// x @ w for few rows of x on a CPU, called by XLA through its foreign function interface; x and w are both bfloat16 or
// both float32. DenseMatmul takes w [K, N] (products.h tells how it is multiplied), DenseMatmulTransposed [N, K].
//
// Every number of the result is one chain of sums over k, or a fixed tree of a few, in one order, however rows and
// columns are put into blocks and whichever thread computes them, so that a row's result does not depend on the others.
//
// The compiler's flags, which the Python side chooses by the processor's features, decide the arithmetic:
//   AVX-512 BF16   of bfloat16 sums of two products in float32; subnormal numbers count as zero
//   else           numbers widened to float32, whose products are exact if they were bfloat16, and fused multiply-adds

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using kernel::ceil_div;
using kernel::Floats;
using kernel::Ints;
using kernel::kLanes;
using kernel::kStrip;
using kernel::load;
using kernel::Product;
using kernel::Span;

// ---- w [K, N] ----

template <typename T>
struct Reader {
  static constexpr int kTerms = 1;
  static void widen_row(const char* row, int32_t* to) {
    const T* from = reinterpret_cast<const T*>(row);
    for (int c = 0; c < kStrip; c += kLanes) kernel::store(to + c, kernel::widen(from + c));
  }
};

#if defined(__AVX512BF16__)
struct PairTerms : kernel::FloatSums {
  static constexpr int kStep = 2, kTerms = 1, kWordNumbers = 2;
  static Floats multiply(Ints pair, Ints word, Floats sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)pair, (__m512bh)word);
  }
  static Ints wide(const char* row, int column) {
    return _mm512_cvtepu16_epi32(kernel::load_as<__m256i>(row + column * sizeof(uint16_t)));
  }
  static void lay_out(const char* const (&rows)[2], int32_t* to) {
    for (int c = 0; c < kStrip; c += kLanes) {
      kernel::store(to + c, _mm512_or_si512(wide(rows[0], c), _mm512_slli_epi32(wide(rows[1], c), 16)));
    }
  }
  template <int R, int V>
  static void accumulate(Floats (&sums)[R][V], const int32_t* numbers, int64_t terms, const int32_t* x,
                         const int32_t*, int64_t) {
    kernel::add_terms<PairTerms, R, V>(sums, numbers, terms, x);
  }
};
template <typename T>
using Terms = std::conditional_t<std::is_same_v<T, uint16_t>, PairTerms, kernel::FloatTerms<Reader<float>>>;
#else
template <typename T>
using Terms = kernel::FloatTerms<Reader<T>>;
#endif

template <typename T, typename Pool>
void multiply(Pool& pool, const Product& p, const T* x) {
  using Kind = Terms<T>;
  kernel::Multiplication<Kind> product(p);
  product.prepare([&](int64_t row, const Span& span, int32_t* words, int64_t apart, int32_t*) {
    kernel::to_words<Kind::kWordNumbers>(x + row * p.k + span.first, span.count, words, apart);
  });
  product.run(pool);
}

// ---- w [N, K] ----

// Registers of numbers of w and x, as one instruction multiplies them.
#if defined(__AVX512BF16__)
template <typename T>
constexpr bool kPairs = std::is_same_v<T, uint16_t>;
#else
template <typename T>
constexpr bool kPairs = false;
#endif
template <typename T>
constexpr int kUnit = kPairs<T> ? 2 * kLanes : kLanes;

template <typename T>
inline Floats multiply_unit(const T* w, const int32_t* x, Floats sum) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>) return PairTerms::multiply(kernel::load_ints(w), kernel::load_ints(x), sum);
#endif
  if constexpr (!kPairs<T>) return kernel::multiply_add(kernel::widen(w), (Floats)kernel::load_ints(x), sum);
}

// x in words, rows padded with zeros to whole units; a row begins where no other one does in a cache's sets.
struct Words {
  const int32_t* x;
  int64_t stride;
};

template <int R, int C, typename T>
void output_rows(const Product& p, const Words& words, int64_t row, int64_t column, bool ask) {
  const int32_t* x = words.x + row * words.stride;
  const T* w = reinterpret_cast<const T*>(p.w) + column * p.k;
  const int64_t units = p.k / kUnit<T>, rest = p.k % kUnit<T>;
  Floats sums[R][C];
  KERNEL_UNROLL
  for (int r = 0; r < R; ++r) {
    KERNEL_UNROLL
    for (int c = 0; c < C; ++c) sums[r][c] = kernel::broadcast(0.0f);
  }
  const auto add_unit = [&](const T* numbers, int64_t stride) {
    KERNEL_UNROLL
    for (int c = 0; c < C; ++c) {
      KERNEL_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[r][c] = multiply_unit(numbers + c * stride, x + r * words.stride, sums[r][c]);
      }
    }
    x += kLanes;
  };
  for (int64_t s = 0; s < units; ++s) {
    if (ask) {
      KERNEL_UNROLL
      for (int c = 0; c < C; ++c) kernel::prefetch(w + (C + c) * p.k + s * kUnit<T>);
    }
    add_unit(w + s * kUnit<T>, p.k);
  }
  if (rest) {
    T last[C][kUnit<T>] = {};
    for (int c = 0; c < C; ++c) std::memcpy(last[c], w + c * p.k + units * kUnit<T>, rest * sizeof(T));
    add_unit(last[0], kUnit<T>);
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      const int64_t at = (row + r) * p.columns + column + c;
      const float total = kernel::sum_lanes(sums[r][c]);
      if (p.out_bfloat16) {
        static_cast<uint16_t*>(p.out)[at] = kernel::to_bfloat16(total);
      } else {
        static_cast<float*>(p.out)[at] = total;
      }
    }
  }
}

// Outputs that share loads of x: as many as the registers hold sums of kMostRows rows, or twice as many of few rows.
constexpr int kOutputs = kernel::kRegisters == 32 ? 4 : 2, kFewOutputRows = 3;
constexpr int64_t kChunksPerThread = 8;

template <int C, typename T>
void outputs(const Product& p, const Words& words, int64_t column, bool more) {
  kernel::for_row_blocks(p.rows, [&](auto size, int64_t row) {
    if constexpr (C <= kOutputs || size <= kFewOutputRows) {
      output_rows<size, C, T>(p, words, row, column, more && row + size == p.rows);
    }
  });
}

// Outputs [first, last).
template <typename T>
void transposed_columns(const Product& p, const Words& words, int64_t first, int64_t last) {
  while (first < last) {
    const int64_t left = last - first;
    if (p.rows <= kFewOutputRows && left >= 2 * kOutputs) {
      outputs<2 * kOutputs, T>(p, words, first, left >= 4 * kOutputs);
      first += 2 * kOutputs;
    } else if (left >= kOutputs) {
      outputs<kOutputs, T>(p, words, first, left >= 2 * kOutputs);
      first += kOutputs;
    } else {
      outputs<1, T>(p, words, first, left > 1);
      first += 1;
    }
  }
}

template <typename T, typename Pool>
void multiply_transposed(Pool& pool, const Product& p, const T* x) {
  constexpr int kWordNumbers = kPairs<T> ? 2 : 1;
  const int64_t stride = ceil_div(p.k, kUnit<T>) * kLanes + 16;
  int32_t* words = reinterpret_cast<int32_t*>(kernel::scratch<0>(p.rows * stride));
  for (int64_t r = 0; r < p.rows; ++r) {
    const int64_t used = ceil_div(p.k, kWordNumbers);
    kernel::to_words<kWordNumbers>(x + r * p.k, p.k, words + r * stride, 1);
    std::fill(words + r * stride + used, words + (r + 1) * stride, 0);
  }
  const int64_t wide = kOutputs * (p.rows <= kFewOutputRows ? 2 : 1);
  const int64_t blocks = ceil_div(p.columns, wide), bytes = p.k * p.columns * sizeof(T);
  const int64_t worth = std::max<int64_t>(1, bytes * ceil_div(p.rows, kernel::kMostRows) / kernel::kBytesPerThread);
  const int64_t threads = std::min({worth, blocks, std::max<int64_t>(1, pool.num_threads())});
  const int64_t chunks = threads == 1 ? 1 : std::min(blocks, threads * kChunksPerThread);
  kernel::parallel_for(pool, threads, chunks, [&](int64_t chunk, int64_t) {
    transposed_columns<T>(p, {words, stride}, chunk * blocks / chunks * wide,
                          std::min((chunk + 1) * blocks / chunks * wide, p.columns));
  });
}

// ---- both ----

template <bool transposed>
ffi::Error dense_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  const ffi::DataType type = x.element_type(), out_type = out->element_type();
  if (type != w.element_type() || (type != ffi::BF16 && type != ffi::F32)) {
    return ffi::Error::InvalidArgument("dense_matmul: x and w must be both bfloat16 or both float32");
  }
  if (out_type != ffi::BF16 && out_type != ffi::F32) {
    return ffi::Error::InvalidArgument("dense_matmul: the result must be bfloat16 or float32");
  }
  Product p{};
  p.rows = x.dimensions()[0];
  p.k = p.stored = x.dimensions()[1];
  p.columns = w.dimensions()[transposed ? 0 : 1];
  p.groups = 1;
  p.w = static_cast<const char*>(w.untyped_data());
  p.column_bytes = type == ffi::BF16 ? sizeof(uint16_t) : sizeof(float);
  p.out = out->untyped_data();
  p.out_bfloat16 = out_type == ffi::BF16;
  const auto run = [&](const auto* numbers) {
    if constexpr (transposed) {
      multiply_transposed(pool, p, numbers);
    } else {
      multiply(pool, p, numbers);
    }
  };
  if (type == ffi::BF16) {
    run(static_cast<const uint16_t*>(x.untyped_data()));
  } else {
    run(x.typed_data<float>());
  }
  return ffi::Error::Success();
}

}  // namespace

#define KERNEL_BINDING \
  ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseMatmul, dense_matmul<false>, KERNEL_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseMatmulTransposed, dense_matmul<true>, KERNEL_BINDING);
