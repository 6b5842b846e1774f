// x @ w for bfloat16 x and w and few rows of x on a CPU, called by XLA through its foreign function interface.
// DenseMatmul takes w [K, N], DenseMatmulTransposed [N, K].
//
// Weights come from memory once, for the first block of rows of x, and from a nearer cache for the blocks that
// follow; the last block asks for what is read next. Every number of the result is one chain of sums over k in one
// order, however rows and columns are put into blocks and whichever thread computes them, so that a row's result
// does not depend on the others.
//
// The compiler's flags, which the Python side chooses by the processor's features, decide the arithmetic:
//   AVX-512 BF16   sums of two products in float32; subnormal numbers count as zero
//   else           numbers widened to float32, whose products are exact, and fused multiply-adds

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using kernel::ceil_div;

namespace {

using Matrix = ffi::Buffer<ffi::BF16, 2>;

#if defined(__AVX512F__)
typedef __m512 Vector;
typedef __m512i Integers;
// Sums that the registers hold: of up to kRows rows, or of up to kFewRows and twice as many columns.
constexpr int kUnits = 2, kOutputs = 4;
#else
typedef __m256 Vector;
typedef __m256i Integers;
constexpr int kUnits = 1, kOutputs = 2;
#endif
constexpr int kRows = 6, kFewRows = 3;
constexpr int kLanes = sizeof(Vector) / sizeof(float);
constexpr int kUnit = 2 * kLanes;  // numbers of w in a register

// Loops over the rows and vectors of a block are unrolled before sums are given registers.
#define KERNEL_UNROLL _Pragma("GCC unroll 16")

// Rows of w [K, N] that are multiplied by all rows of x before the next ones: with kUnits units of columns they
// fit into a second-level cache beside those asked for.
constexpr int64_t kDepth = 512;
// A thread that reads less than this of w costs more to wake than it saves.
constexpr int64_t kBytesPerThread = 128 << 10;
constexpr int64_t kChunksPerThread = 8;

#if defined(__AVX512BF16__)
typedef int32_t Term;  // of x as products read it: a pair of bfloat16
constexpr int kTermNumbers = 2;
#else
typedef float Term;
constexpr int kTermNumbers = 1;
#endif

const uint16_t kZeros[2 * kUnits * kUnit] = {};

struct Problem {
  int64_t rows, k, columns;
  const uint16_t* w;
  void* out;  // [rows, columns]
  bool out_bfloat16;
  // x as the arithmetic reads it, x_stride terms a row; see prepare.
  const Term* x;
  int64_t x_stride;
  std::vector<Term> prepared;
};

Integers load(const uint16_t* p) {
  Integers v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

void store(const Problem& p, int64_t at, const float* values, int64_t count) {
  if (!p.out_bfloat16) {
    std::memcpy(static_cast<float*>(p.out) + at, values, count * sizeof(float));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(p.out) + at;
  for (int64_t i = 0; i < count; ++i) to[i] = kernel::to_bfloat16(values[i]);
}

// Calls body(size of the block, its first row, whether it is the last) for blocks of at most `most` rows; the size
// is a constant. Blocks are of nearly equal size: 8 rows are 4 + 4, not 6 + 2.
template <int most, typename Body>
void for_blocks(int64_t rows, const Body& body) {
  static_assert(most == kRows || most == kFewRows);
  const int64_t blocks = ceil_div(rows, most);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t row = b * rows / blocks;
    const bool last = b + 1 == blocks;
    switch ((b + 1) * rows / blocks - row) {
      case 1: body(std::integral_constant<int, 1>{}, row, last); break;
      case 2: body(std::integral_constant<int, 2>{}, row, last); break;
      case 3: body(std::integral_constant<int, 3>{}, row, last); break;
      case 4: body(std::integral_constant<int, std::min(4, most)>{}, row, last); break;
      case 5: body(std::integral_constant<int, std::min(5, most)>{}, row, last); break;
      case 6: body(std::integral_constant<int, std::min(6, most)>{}, row, last); break;
    }
  }
}

#if !defined(__AVX512BF16__)
// A register of bfloat16 as two of float32: its numbers of even and of odd place.
#if defined(__AVX512F__)
Vector even(Integers v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
Vector odd(Integers v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(0xffff0000))); }
Vector broadcast(float a) { return _mm512_set1_ps(a); }
Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#else
Vector even(Integers v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
Vector odd(Integers v) { return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(0xffff0000))); }
Vector broadcast(float a) { return _mm256_set1_ps(a); }
Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#endif
Vector load(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
#endif

// ---- w [K, N] ----

// Adds the products of two rows of w. A unit of columns has two sums: of the columns that unpacking leaves in the
// first and in the second register, or of its even and its odd columns; see unit_columns.
template <int R, int U>
inline void add_rows(Vector (&sums)[R][2 * U], const uint16_t* first, const uint16_t* second, const Term* x,
                     int64_t x_stride) {
  KERNEL_UNROLL
  for (int u = 0; u < U; ++u) {
    const Integers a = load(first + u * kUnit), b = load(second + u * kUnit);
#if defined(__AVX512BF16__)
    const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(x[r * x_stride]);
      sums[r][2 * u] = _mm512_dpbf16_ps(sums[r][2 * u], low, pair);
      sums[r][2 * u + 1] = _mm512_dpbf16_ps(sums[r][2 * u + 1], high, pair);
    }
#else
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vector number = broadcast(x[r * x_stride]);
      sums[r][2 * u] = multiply_add(number, even(a), sums[r][2 * u]);
      sums[r][2 * u + 1] = multiply_add(number, odd(a), sums[r][2 * u + 1]);
    }
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vector number = broadcast(x[r * x_stride + 1]);
      sums[r][2 * u] = multiply_add(number, even(b), sums[r][2 * u]);
      sums[r][2 * u + 1] = multiply_add(number, odd(b), sums[r][2 * u + 1]);
    }
#endif
  }
}

// The sums of a unit in the order of its columns.
void unit_columns(const Vector (&sums)[2], float (&to)[kUnit]) {
  Vector a = sums[0], b = sums[1];
#if !defined(__AVX512BF16__) && defined(__AVX512F__)
  a = _mm512_unpacklo_ps(sums[0], sums[1]), b = _mm512_unpackhi_ps(sums[0], sums[1]);
#elif !defined(__AVX512BF16__)
  a = _mm256_unpacklo_ps(sums[0], sums[1]), b = _mm256_unpackhi_ps(sums[0], sums[1]);
#endif
  for (int lane = 0; lane < kLanes / 4; ++lane) {
    std::memcpy(to + 8 * lane, reinterpret_cast<const char*>(&a) + 16 * lane, 16);
    std::memcpy(to + 8 * lane + 4, reinterpret_cast<const char*>(&b) + 16 * lane, 16);
  }
}

// Rows [first, last) of w and columns of it from w on, and where the weights read after them are.
struct Tile {
  int64_t first, last;
  const uint16_t* w;
  int64_t stride;
  const uint16_t* next;  // or null
};

// Adds a tile's products to the sums of rows [row, row + R), which rest in `sums` between tiles.
template <int R, int U>
void tile_rows(const Problem& p, const Tile& tile, int64_t row, float* sums, bool ask) {
  // Copied one by one: GCC keeps an array that is copied whole in memory.
  Vector block[R][2 * U];
  KERNEL_UNROLL
  for (int r = 0; r < R; ++r) {
    KERNEL_UNROLL
    for (int i = 0; i < 2 * U; ++i) std::memcpy(&block[r][i], sums + (r * 2 * U + i) * kLanes, sizeof(Vector));
  }
  const Term* x = p.x + row * p.x_stride + tile.first / kTermNumbers;
  const uint16_t* w = tile.w + tile.first * tile.stride;
  const int64_t pairs = (tile.last - tile.first) / 2, step = 2 * tile.stride;
  for (int64_t s = 0; s < pairs; ++s, w += step, x += 2 / kTermNumbers) {
    if (ask) {
      const uint16_t* next = tile.next + s * step;
      KERNEL_UNROLL
      for (int u = 0; u < U; ++u) {
        _mm_prefetch(reinterpret_cast<const char*>(next + u * kUnit), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(next + tile.stride + u * kUnit), _MM_HINT_T1);
      }
    }
    add_rows<R, U>(block, w, w + tile.stride, x, p.x_stride);
  }
  if ((tile.last - tile.first) % 2) add_rows<R, U>(block, w, kZeros, x, p.x_stride);
  KERNEL_UNROLL
  for (int r = 0; r < R; ++r) {
    KERNEL_UNROLL
    for (int i = 0; i < 2 * U; ++i) std::memcpy(sums + (r * 2 * U + i) * kLanes, &block[r][i], sizeof(Vector));
  }
}

// The product with U units of columns, of which count are there and the others readable.
template <int U>
void strip(const Problem& p, int64_t first, int64_t count, const uint16_t* w, int64_t stride, bool more,
           std::vector<float>& sums) {
  constexpr int kMost = U > kUnits ? kFewRows : kRows;
  sums.assign(p.rows * U * kUnit, 0.0f);
  const int64_t tiles = ceil_div(p.k, kDepth), depth = ceil_div(ceil_div(p.k, tiles), 2) * 2;
  for (int64_t k = 0; k < p.k; k += depth) {
    Tile tile{k, std::min(k + depth, p.k), w, stride, nullptr};
    if (tile.last < p.k) {
      tile.next = w + tile.last * stride;
    } else if (more) {
      tile.next = w + U * kUnit;
    }
    for_blocks<kMost>(p.rows, [&](auto size, int64_t row, bool last) {
      tile_rows<size, U>(p, tile, row, &sums[row * U * kUnit], last && tile.next);
    });
  }
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int u = 0; u * kUnit < count; ++u) {
      Vector unit[2];
      std::memcpy(unit, &sums[(r * U + u) * kUnit], sizeof unit);
      float values[kUnit];
      unit_columns(unit, values);
      store(p, r * p.columns + first + u * kUnit, values, std::min<int64_t>(kUnit, count - u * kUnit));
    }
  }
}

// Columns of the units [first, last).
void columns(const Problem& p, int64_t first, int64_t last) {
  std::vector<float> sums;
  const int64_t whole = std::min(last, p.columns / kUnit);
  int64_t unit = first;
  while (unit < whole) {
    const int64_t left = whole - unit, column = unit * kUnit;
    if (p.rows <= kFewRows && left >= 2 * kUnits) {
      strip<2 * kUnits>(p, column, 2 * kUnits * kUnit, p.w + column, p.columns, left > 2 * kUnits, sums);
      unit += 2 * kUnits;
    } else if (left >= kUnits) {
      strip<kUnits>(p, column, kUnits * kUnit, p.w + column, p.columns, left > kUnits, sums);
      unit += kUnits;
    } else {
      strip<1>(p, column, kUnit, p.w + column, p.columns, left > 1, sums);
      unit += 1;
    }
  }
  if (unit < last) {
    // Columns that fill no unit are copied into one.
    const int64_t column = unit * kUnit, count = p.columns - column;
    std::vector<uint16_t> w(p.k * kUnit);
    for (int64_t k = 0; k < p.k; ++k) std::memcpy(&w[k * kUnit], p.w + k * p.columns + column, count * sizeof(uint16_t));
    strip<1>(p, column, count, w.data(), kUnit, false, sums);
  }
}

// ---- w [N, K] ----

// Adds the products of a register of each of C rows of w.
template <int R, int C>
inline void add_unit(Vector (&sums)[R][C], const uint16_t* w, int64_t w_stride, const Term* x, int64_t x_stride) {
  KERNEL_UNROLL
  for (int c = 0; c < C; ++c) {
    const Integers numbers = load(w + c * w_stride);
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
#if defined(__AVX512BF16__)
      const __m512bh pairs = (__m512bh)_mm512_loadu_si512(x + r * x_stride);
      sums[r][c] = _mm512_dpbf16_ps(sums[r][c], (__m512bh)numbers, pairs);
#else
      sums[r][c] = multiply_add(even(numbers), load(x + r * x_stride), sums[r][c]);
      sums[r][c] = multiply_add(odd(numbers), load(x + r * x_stride + kLanes), sums[r][c]);
#endif
    }
  }
}

// The sums of four registers' numbers, each in the same order of additions.
__m128 totals(Vector a, Vector b, Vector c, Vector d) {
#if defined(__AVX512F__)
  const Vector ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  const Vector cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  const Vector wide = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
  const __m256 half = _mm512_castps512_ps256(wide) + _mm512_extractf32x8_ps(wide, 1);
#else
  const Vector ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
  const Vector cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
  const __m256 half = _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee);
#endif
  return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}

template <int R, int C>
void output_rows(const Problem& p, int64_t row, int64_t column, bool ask) {
  const Term* x = p.x + row * p.x_stride;
  const uint16_t* w = p.w + column * p.k;
  const int64_t units = p.k / kUnit, rest = p.k % kUnit;
  Vector sums[R][C] = {};
  for (int64_t s = 0; s < units; ++s, x += kUnit / kTermNumbers) {
    if (ask) {
      KERNEL_UNROLL
      for (int c = 0; c < C; ++c) {
        _mm_prefetch(reinterpret_cast<const char*>(w + (C + c) * p.k + s * kUnit), _MM_HINT_T0);
      }
    }
    add_unit<R, C>(sums, w + s * kUnit, p.k, x, p.x_stride);
  }
  if (rest) {
    uint16_t last[C][kUnit] = {};
    for (int c = 0; c < C; ++c) std::memcpy(last[c], w + c * p.k + units * kUnit, rest * sizeof(uint16_t));
    add_unit<R, C>(sums, last[0], kUnit, x, p.x_stride);
  }
  KERNEL_UNROLL
  for (int r = 0; r < R; ++r) {
    KERNEL_UNROLL
    for (int c = 0; c < C; c += 4) {
      constexpr int kLast = C - 1;
      const __m128 four = totals(sums[r][c], sums[r][std::min(c + 1, kLast)], sums[r][std::min(c + 2, kLast)],
                                 sums[r][std::min(c + 3, kLast)]);
      float values[4];
      std::memcpy(values, &four, sizeof values);
      store(p, (row + r) * p.columns + column + c, values, std::min(4, C - c));
    }
  }
}

template <int C>
void outputs(const Problem& p, int64_t column, bool more) {
  constexpr int kMost = C > kOutputs ? kFewRows : kRows;
  for_blocks<kMost>(p.rows, [&](auto size, int64_t row, bool last) {
    output_rows<size, C>(p, row, column, last && more);
  });
}

// Outputs [first, last).
void transposed_columns(const Problem& p, int64_t first, int64_t last) {
  while (first < last) {
    const int64_t left = last - first;
    if (p.rows <= kFewRows && left >= 2 * kOutputs) {
      outputs<2 * kOutputs>(p, first, left >= 4 * kOutputs);
      first += 2 * kOutputs;
    } else if (left >= kOutputs) {
      outputs<kOutputs>(p, first, left >= 2 * kOutputs);
      first += kOutputs;
    } else {
      outputs<1>(p, first, left > 1);
      first += 1;
    }
  }
}

// ---- both ----

// Lays x out as the arithmetic reads it, rows padded with zeros: in order, or widened, with the even numbers of
// each unit before its odd ones when w is transposed.
void prepare(Problem& p, const uint16_t* x, bool transposed) {
  const int64_t unit = transposed ? kUnit : 2, padded = ceil_div(p.k, unit) * unit;
  p.x_stride = padded / kTermNumbers;
#if defined(__AVX512BF16__)
  if (padded == p.k) {
    p.x = reinterpret_cast<const Term*>(x);
    return;
  }
  p.prepared.resize(p.rows * p.x_stride);
  for (int64_t r = 0; r < p.rows; ++r) {
    std::memcpy(&p.prepared[r * p.x_stride], x + r * p.k, p.k * sizeof(uint16_t));
  }
#else
  p.prepared.resize(p.rows * p.x_stride);
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t k = 0; k < p.k; ++k) {
      const int64_t place = k % kUnit, at = transposed ? k - place + place / 2 + place % 2 * kLanes : k;
      p.prepared[r * p.x_stride + at] = kernel::from_bfloat16(x[r * p.k + k]);
    }
  }
#endif
  p.x = p.prepared.data();
}

template <bool transposed>
ffi::Error dense_matmul(ffi::ThreadPool pool, Matrix x, Matrix w, ffi::Result<ffi::AnyBuffer> out) {
  const ffi::DataType out_type = out->element_type();
  if (out_type != ffi::BF16 && out_type != ffi::F32) {
    return ffi::Error::InvalidArgument("dense_matmul: the result must be bfloat16 or float32");
  }
  Problem p;
  p.rows = x.dimensions()[0];
  p.k = x.dimensions()[1];
  p.columns = w.dimensions()[transposed ? 0 : 1];
  p.w = reinterpret_cast<const uint16_t*>(w.typed_data());
  p.out = out->untyped_data();
  p.out_bfloat16 = out_type == ffi::BF16;
  prepare(p, reinterpret_cast<const uint16_t*>(x.typed_data()), transposed);

  // Threads take runs of the widest block of columns.
  const bool few = p.rows <= kFewRows;
  const int64_t wide = (transposed ? kOutputs : kUnits * kUnit) * (few ? 2 : 1), unit = transposed ? 1 : kUnit;
  const int64_t blocks = ceil_div(p.columns, wide), bytes = p.k * p.columns * sizeof(uint16_t);
  const int64_t worth = std::max<int64_t>(1, bytes * ceil_div(p.rows, kRows) / kBytesPerThread);
  const int64_t threads = std::min({worth, blocks, std::max<int64_t>(1, pool.num_threads())});
  const int64_t chunks = threads == 1 ? 1 : std::min(blocks, threads * kChunksPerThread);
  const int64_t per_block = wide / unit, most = ceil_div(p.columns, unit);
  kernel::parallel_for(pool, threads, chunks, [&](int64_t chunk) {
    const int64_t first = chunk * blocks / chunks * per_block;
    const int64_t last = std::min((chunk + 1) * blocks / chunks * per_block, most);
    if (transposed) {
      transposed_columns(p, first, last);
    } else {
      columns(p, first, last);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

#define KERNEL_BINDING \
  ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Matrix>().Arg<Matrix>().Ret<ffi::AnyBuffer>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseMatmul, dense_matmul<false>, KERNEL_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(DenseMatmulTransposed, dense_matmul<true>, KERNEL_BINDING);
