// (x * x_scale) @ (w * w_scale) for 8- and 4-bit weights on a CPU, called by XLA through its foreign function
// interface. The arguments are those of quant_matmul in the Python package.
//
// w is [stored, N] with N contiguous. A strip of kColumns columns is the unit of work: its part of w comes from
// memory once, for the first kRows rows of x, and from the second-level cache for those that follow. Every row
// of x meets the same operations in the same order however many rows there are and whichever thread computes
// them, so that a row's result does not depend on the others.
//
// Which arithmetic is compiled follows from the compiler's flags, which the Python side chooses by the
// processor's features:
//   AVX-512 VNNI   int8 activations: sums of four products of bytes in int32
//   AVX-512 BF16   bfloat16 activations: sums of two products in float32
//   everything     float32 multiply-adds. Of int8 activations at most kExactTerms products, each at most 2^14,
//                  are summed before the sum goes on in int32: up to 2^24 float32 holds every integer.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using kernel::ceil_div;
using kernel::from_bfloat16;
using kernel::to_bfloat16;

namespace {

using Weights = ffi::Buffer<ffi::S8, 2>;
using Scales = ffi::Buffer<ffi::F32, 2>;
using RowScales = ffi::Buffer<ffi::F32, 1>;

#if defined(__AVX512F__)
typedef __m512 Vector;
typedef __m512i IntVector;
constexpr int kVectors = 4, kRows = 6;
#elif defined(__AVX2__)
typedef __m256 Vector;
typedef __m256i IntVector;
constexpr int kVectors = 2, kRows = 4;
#else
typedef float Vector __attribute__((vector_size(16)));
constexpr int kVectors = 2, kRows = 4;
#endif
constexpr int kLanes = sizeof(Vector) / sizeof(float);
constexpr int kColumns = kLanes * kVectors;
typedef int32_t Int32s __attribute__((vector_size(sizeof(Vector))));

// Loops over the rows and vectors of a block are unrolled before sums are given registers. Sums are of the type that
// the instructions have: GCC keeps an array that is cast in memory and stores it in every step.
#define KERNEL_UNROLL _Pragma("GCC unroll 8")

constexpr int64_t kExactTerms = 1024;
// A thread that reads less than this of w costs more to wake than it saves.
constexpr int64_t kBytesPerThread = 128 << 10;
constexpr int64_t kChunksPerThread = 8;

enum class Arithmetic { kVnni, kBfloat16, kFloat, kFloatOfIntegers };

struct Problem {
  Arithmetic arithmetic;
  bool packed;
  int64_t rows, k, columns, stored, groups;
  const int8_t* w;
  const float* w_scale;  // [groups, columns]
  const float* x_scale;  // [rows], or null
  void* out;             // [rows, columns]
  bool out_bfloat16;
  // x as the arithmetic reads it, x_stride bytes a row; see prepare.
  std::vector<char> x;
  int64_t x_stride;
  std::vector<int32_t> corrections;  // [rows, groups], what an integer sum starts from
  int64_t group_rows() const { return stored / groups; }
};

// Columns [first, first + count) of w and its scales, readable up to kColumns of them.
struct Strip {
  int64_t first, count;
  const int8_t* w;
  int64_t w_stride;
  const float* scale;
  int64_t scale_stride;
};

Vector load(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

Int32s to_integers(Vector v) { return __builtin_convertvector(v, Int32s); }
Vector to_floats(Int32s v) { return __builtin_convertvector(v, Vector); }

// Writes a row of the result from its totals, of which w_scale is a factor already and x_scale not yet.
void finish_row(const Problem& p, const Strip& strip, int64_t row, const Vector (&totals)[kVectors]) {
  float values[kColumns];
  std::memcpy(values, totals, sizeof values);
  const float scale = p.x_scale ? p.x_scale[row] : 1.0f;
  for (float& value : values) value *= scale;
  const int64_t at = row * p.columns + strip.first;
  if (p.out_bfloat16) {
    uint16_t rounded[kColumns];
    for (int c = 0; c < kColumns; ++c) rounded[c] = to_bfloat16(values[c]);
    std::memcpy(static_cast<uint16_t*>(p.out) + at, rounded, strip.count * sizeof(uint16_t));
  } else {
    std::memcpy(static_cast<float*>(p.out) + at, values, strip.count * sizeof(float));
  }
}

// Which numbers of a row of w are wanted: all of its bytes, or the low or the high nibbles of them.
enum class Part { kByte, kLow, kHigh };

template <Part part>
Vector widen(const int8_t* p) {
#if defined(__AVX512F__)
  IntVector v = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if (part == Part::kLow) v = _mm512_srai_epi32(_mm512_slli_epi32(v, 28), 28);
  if (part == Part::kHigh) v = _mm512_srai_epi32(v, 4);
  return _mm512_cvtepi32_ps(v);
#elif defined(__AVX2__)
  IntVector v = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  if (part == Part::kLow) v = _mm256_srai_epi32(_mm256_slli_epi32(v, 28), 28);
  if (part == Part::kHigh) v = _mm256_srai_epi32(v, 4);
  return _mm256_cvtepi32_ps(v);
#else
  Int32s v;
  for (int c = 0; c < kLanes; ++c) v[c] = p[c];
  if (part == Part::kLow) v = (v << 28) >> 28;
  if (part == Part::kHigh) v = v >> 4;
  return to_floats(v);
#endif
}

Vector multiply_add(float a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(_mm512_set1_ps(a), b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(_mm256_set1_ps(a), b, c);
#else
  return c + a * b;
#endif
}

template <Part part, int R>
inline void add_row(Vector (&sums)[R][kVectors], const int8_t* w, const float* x, int64_t x_stride) {
  Vector wide[kVectors];
KERNEL_UNROLL
  for (int i = 0; i < kVectors; ++i) wide[i] = widen<part>(w + i * kLanes);
KERNEL_UNROLL
  for (int r = 0; r < R; ++r) {
KERNEL_UNROLL
    for (int i = 0; i < kVectors; ++i) sums[r][i] = multiply_add(x[r * x_stride], wide[i], sums[r][i]);
  }
}

// Sums over rows [first, last) of w; x is float32 and points at the row's first number of k.
template <int R, bool packed>
inline void float_sums(Vector (&sums)[R][kVectors], const Strip& strip, int64_t first, int64_t last, const float* x,
                       int64_t x_stride) {
  for (int64_t s = first; s < last; ++s) {
    const int8_t* w = strip.w + s * strip.w_stride;
    if (packed) {
      add_row<Part::kLow>(sums, w, x + 2 * s, x_stride);
      add_row<Part::kHigh>(sums, w, x + 2 * s + 1, x_stride);
    } else {
      add_row<Part::kByte>(sums, w, x + s, x_stride);
    }
  }
}

template <int R, bool packed>
void float_rows(const Problem& p, const Strip& strip, int64_t row) {
  const float* x = reinterpret_cast<const float*>(p.x.data() + row * p.x_stride);
  const int64_t x_stride = p.x_stride / sizeof(float);
  const bool integers = p.arithmetic == Arithmetic::kFloatOfIntegers;
  const int64_t size = p.group_rows();
  const int64_t unit = integers ? std::min(size, kExactTerms / (packed ? 2 : 1)) : size;
  Vector totals[R][kVectors] = {};
  for (int64_t g = 0; g < p.groups; ++g) {
    Int32s integer_sums[R][kVectors] = {};
    Vector sums[R][kVectors] = {};
    for (int64_t first = g * size; first < (g + 1) * size; first += unit) {
      Vector unit_sums[R][kVectors] = {};
      float_sums<R, packed>(unit_sums, strip, first, std::min(first + unit, (g + 1) * size), x, x_stride);
KERNEL_UNROLL
      for (int r = 0; r < R; ++r) {
KERNEL_UNROLL
        for (int i = 0; i < kVectors; ++i) {
          if (integers) integer_sums[r][i] += to_integers(unit_sums[r][i]);
          sums[r][i] = integers ? to_floats(integer_sums[r][i]) : unit_sums[r][i];
        }
      }
    }
KERNEL_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      const Vector scale = load(strip.scale + g * strip.scale_stride + i * kLanes);
KERNEL_UNROLL
      for (int r = 0; r < R; ++r) totals[r][i] += sums[r][i] * scale;
    }
  }
KERNEL_UNROLL
  for (int r = 0; r < R; ++r) finish_row(p, strip, row + r, totals[r]);
}

#if defined(__AVX512BF16__)
// Two rows of w as pairs of bfloat16 a column, which hold 8-bit integers exactly.
inline __m512bh pair(Vector even, Vector odd) {
  const IntVector low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
  const IntVector high = _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32(0xffff0000));
  return (__m512bh)_mm512_or_si512(low, high);
}

template <int R, bool packed>
void bfloat16_rows(const Problem& p, const Strip& strip, int64_t row) {
  const int32_t* x = reinterpret_cast<const int32_t*>(p.x.data() + row * p.x_stride);
  const int64_t x_stride = p.x_stride / sizeof(int32_t), size = p.group_rows();
  Vector totals[R][kVectors] = {};
  for (int64_t g = 0; g < p.groups; ++g) {
    Vector sums[R][kVectors] = {};
    for (int64_t s = 0; s < size; s += packed ? 1 : 2, ++x) {
      const int8_t* w = strip.w + (g * size + s) * strip.w_stride;
      // A last row without a partner meets itself and a zero of x.
      const int8_t* next = s + 1 < size ? w + strip.w_stride : w;
KERNEL_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const int8_t* at = w + i * kLanes;
        const __m512bh both = packed ? pair(widen<Part::kLow>(at), widen<Part::kHigh>(at))
                                     : pair(widen<Part::kByte>(at), widen<Part::kByte>(next + i * kLanes));
KERNEL_UNROLL
        for (int r = 0; r < R; ++r) {
          sums[r][i] = _mm512_dpbf16_ps(sums[r][i], both, (__m512bh)_mm512_set1_epi32(x[r * x_stride]));
        }
      }
    }
KERNEL_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      const Vector scale = load(strip.scale + g * strip.scale_stride + i * kLanes);
KERNEL_UNROLL
      for (int r = 0; r < R; ++r) totals[r][i] += sums[r][i] * scale;
    }
  }
KERNEL_UNROLL
  for (int r = 0; r < R; ++r) finish_row(p, strip, row + r, totals[r]);
}
#endif

#if defined(__AVX512VNNI__)
// Transposes the 4 x 4 matrix of 128-bit lanes; its own inverse. Interleaving leaves lane j of vector i with
// columns 16 j + 4 i to 16 j + 4 i + 3, transposing puts them in order.
inline void transpose_lanes(IntVector (&v)[4]) {
  const IntVector a = _mm512_shuffle_i32x4(v[0], v[1], 0x88), b = _mm512_shuffle_i32x4(v[0], v[1], 0xdd);
  const IntVector c = _mm512_shuffle_i32x4(v[2], v[3], 0x88), d = _mm512_shuffle_i32x4(v[2], v[3], 0xdd);
  v[0] = _mm512_shuffle_i32x4(a, c, 0x88);
  v[1] = _mm512_shuffle_i32x4(b, d, 0x88);
  v[2] = _mm512_shuffle_i32x4(a, c, 0xdd);
  v[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

// Adds the products of four rows of w, `next` bytes apart but for those that a short last step lacks, which are
// the first one again and meet zeros of x. The instruction multiplies unsigned bytes by signed ones: flipping the
// sign bit of a weight adds 128 to it (8 to a nibble), which the corrections take off again.
template <int R, bool packed>
inline void add_step(Int32s (&sums)[R][4], const int8_t* w, const int64_t (&next)[4], const int32_t* x,
                     int64_t x_stride) {
  const IntVector flip = _mm512_set1_epi8(static_cast<char>(packed ? 0x88 : 0x80));
  const IntVector nibble = _mm512_set1_epi8(0x0f);
  IntVector rows[4];
  KERNEL_UNROLL
  for (int j = 0; j < 4; ++j) rows[j] = _mm512_xor_si512(_mm512_loadu_si512(w + next[j]), flip);
  const IntVector a = _mm512_unpacklo_epi8(rows[0], rows[1]), b = _mm512_unpackhi_epi8(rows[0], rows[1]);
  const IntVector c = _mm512_unpacklo_epi8(rows[2], rows[3]), d = _mm512_unpackhi_epi8(rows[2], rows[3]);
  const IntVector quads[4] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c), _mm512_unpacklo_epi16(b, d),
                              _mm512_unpackhi_epi16(b, d)};
  KERNEL_UNROLL
  for (int word = 0; word < (packed ? 2 : 1); ++word) {
    IntVector values[4];
    KERNEL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const IntVector shifted = word == 0 ? quads[i] : _mm512_srli_epi16(quads[i], 4);
      values[i] = packed ? _mm512_and_si512(shifted, nibble) : quads[i];
    }
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
      const IntVector quad = _mm512_set1_epi32(x[r * x_stride + word]);
      KERNEL_UNROLL
      for (int i = 0; i < 4; ++i) {
        sums[r][i] = (Int32s)_mm512_dpbusd_epi32((IntVector)sums[r][i], values[i], quad);
      }
    }
  }
}

template <int R, bool packed>
void vnni_rows(const Problem& p, const Strip& strip, int64_t row) {
  constexpr int kWords = packed ? 2 : 1;  // of x, four numbers each, a step of four rows of w
  const int32_t* x = reinterpret_cast<const int32_t*>(p.x.data() + row * p.x_stride);
  const int64_t x_stride = p.x_stride / sizeof(int32_t), size = p.group_rows(), stride = strip.w_stride;
  const int64_t steps = size / 4, rest = size % 4;
  const int64_t next[4] = {0, stride, 2 * stride, 3 * stride};
  const int64_t last[4] = {0, rest > 1 ? stride : 0, rest > 2 ? 2 * stride : 0, 0};
  Vector totals[R][4] = {};
  for (int64_t g = 0; g < p.groups; ++g) {
    const int8_t* w = strip.w + g * size * stride;
    Int32s sums[R][4];
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
      const Int32s start = (Int32s)_mm512_set1_epi32(p.corrections[(row + r) * p.groups + g]);
      KERNEL_UNROLL
      for (int i = 0; i < 4; ++i) sums[r][i] = start;
    }
    for (int64_t s = 0; s < steps; ++s, x += kWords, w += 4 * stride) add_step<R, packed>(sums, w, next, x, x_stride);
    if (rest) {
      add_step<R, packed>(sums, w, last, x, x_stride);
      x += kWords;
    }
    IntVector scales[4];
    std::memcpy(scales, strip.scale + g * strip.scale_stride, sizeof scales);
    transpose_lanes(scales);
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
      KERNEL_UNROLL
      for (int i = 0; i < 4; ++i) totals[r][i] += to_floats(sums[r][i]) * _mm512_castsi512_ps(scales[i]);
    }
  }
  for (int r = 0; r < R; ++r) {
    IntVector ordered[4];
    std::memcpy(ordered, totals[r], sizeof ordered);
    transpose_lanes(ordered);
    std::memcpy(totals[r], ordered, sizeof ordered);
    finish_row(p, strip, row + r, totals[r]);
  }
}
#endif

template <int R, bool packed>
void some_rows(const Problem& p, const Strip& strip, int64_t row) {
  switch (p.arithmetic) {
#if defined(__AVX512VNNI__)
    case Arithmetic::kVnni:
      return vnni_rows<R, packed>(p, strip, row);
#endif
#if defined(__AVX512BF16__)
    case Arithmetic::kBfloat16:
      return bfloat16_rows<R, packed>(p, strip, row);
#endif
    default:
      return float_rows<R, packed>(p, strip, row);
  }
}

template <bool packed>
void all_rows(const Problem& p, const Strip& strip) {
  // Blocks of nearly equal size: 8 rows are 4 + 4, not 6 + 2.
  const int64_t blocks = ceil_div(p.rows, kRows);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t row = b * p.rows / blocks;
    switch ((b + 1) * p.rows / blocks - row) {
      case 1: some_rows<1, packed>(p, strip, row); break;
      case 2: some_rows<2, packed>(p, strip, row); break;
      case 3: some_rows<3, packed>(p, strip, row); break;
      case 4: some_rows<4, packed>(p, strip, row); break;
      case 5: some_rows<std::min(5, kRows), packed>(p, strip, row); break;
      case 6: some_rows<std::min(6, kRows), packed>(p, strip, row); break;
    }
  }
}

void multiply_strip(const Problem& p, int64_t index) {
  const int64_t first = index * kColumns, count = std::min<int64_t>(kColumns, p.columns - first);
  Strip strip{first, count, p.w + first, p.columns, p.w_scale + first, p.columns};
  std::vector<int8_t> w;
  std::vector<float> scale;
  if (count < kColumns) {
    w.resize(p.stored * kColumns);
    scale.resize(p.groups * kColumns);
    for (int64_t s = 0; s < p.stored; ++s) std::memcpy(&w[s * kColumns], strip.w + s * p.columns, count);
    for (int64_t g = 0; g < p.groups; ++g) {
      std::memcpy(&scale[g * kColumns], strip.scale + g * p.columns, count * sizeof(float));
    }
    strip = {first, count, w.data(), kColumns, scale.data(), kColumns};
  }
  if (p.packed) {
    all_rows<true>(p, strip);
  } else {
    all_rows<false>(p, strip);
  }
}

// Lays x out as the arithmetic reads it: float32 in order; pairs of bfloat16, an odd group's last with a zero;
// or for each step of four rows of w its four numbers, of 4-bit weights the four even ones and the four odd ones.
void prepare(Problem& p, const void* x, ffi::DataType type) {
  const auto number = [&](int64_t i) {
    if (type == ffi::S8) return static_cast<float>(static_cast<const int8_t*>(x)[i]);
    if (type == ffi::BF16) return from_bfloat16(static_cast<const uint16_t*>(x)[i]);
    return static_cast<const float*>(x)[i];
  };
  const int64_t terms = p.k / p.groups, parts = p.packed ? 2 : 1;
  switch (p.arithmetic) {
    case Arithmetic::kFloat:
    case Arithmetic::kFloatOfIntegers: {
      p.x_stride = p.k * sizeof(float);
      p.x.resize(p.rows * p.x_stride);
      float* to = reinterpret_cast<float*>(p.x.data());
      for (int64_t i = 0; i < p.rows * p.k; ++i) to[i] = number(i);
      break;
    }
    case Arithmetic::kBfloat16: {
      const int64_t padded = ceil_div(terms, 2) * 2;
      p.x_stride = p.groups * padded * sizeof(uint16_t);
      p.x.resize(p.rows * p.x_stride);
      uint16_t* to = reinterpret_cast<uint16_t*>(p.x.data());
      const uint16_t* from = static_cast<const uint16_t*>(x);
      for (int64_t i = 0; i < p.rows * p.groups; ++i) std::copy_n(from + i * terms, terms, to + i * padded);
      break;
    }
    case Arithmetic::kVnni: {
      const int64_t size = p.group_rows(), padded = ceil_div(size, 4) * 4 * parts;
      p.x_stride = p.groups * padded;
      p.x.resize(p.rows * p.x_stride);
      p.corrections.resize(p.rows * p.groups);
      const int8_t* from = static_cast<const int8_t*>(x);
      char* to = p.x.data();
      for (int64_t i = 0; i < p.rows * p.groups; ++i, from += terms, to += padded) {
        int32_t sum = 0;
        for (int64_t t = 0; t < terms; ++t) sum += from[t];
        p.corrections[i] = -(p.packed ? 8 : 128) * sum;
        if (!p.packed) {
          std::memcpy(to, from, terms);
          continue;
        }
        for (int64_t s = 0; s < size; ++s) {
          char* quad = to + s / 4 * 8 + s % 4;
          quad[0] = from[2 * s];
          quad[4] = from[2 * s + 1];
        }
      }
      break;
    }
  }
}

Arithmetic arithmetic_of(ffi::DataType type) {
  if (type == ffi::S8) {
#if defined(__AVX512VNNI__)
    return Arithmetic::kVnni;
#else
    return Arithmetic::kFloatOfIntegers;
#endif
  }
#if defined(__AVX512BF16__)
  if (type == ffi::BF16) return Arithmetic::kBfloat16;
#endif
  return Arithmetic::kFloat;
}

ffi::Error quant_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, RowScales x_scale, Weights w, Scales w_scale,
                        ffi::Result<ffi::AnyBuffer> out) {
  const ffi::DataType type = x.element_type(), out_type = out->element_type();
  if (type != ffi::S8 && type != ffi::BF16 && type != ffi::F32) {
    return ffi::Error::InvalidArgument("quant_matmul: x must be int8, bfloat16 or float32");
  }
  if (out_type != ffi::BF16 && out_type != ffi::F32) {
    return ffi::Error::InvalidArgument("quant_matmul: the result must be bfloat16 or float32");
  }
  Problem p;
  p.arithmetic = arithmetic_of(type);
  p.rows = x.dimensions()[0];
  p.k = x.dimensions()[1];
  p.stored = w.dimensions()[0];
  p.columns = w.dimensions()[1];
  p.groups = w_scale.dimensions()[0];
  p.packed = p.stored != p.k;
  p.w = w.typed_data();
  p.w_scale = w_scale.typed_data();
  p.x_scale = type == ffi::S8 ? x_scale.typed_data() : nullptr;
  p.out = out->untyped_data();
  p.out_bfloat16 = out_type == ffi::BF16;
  prepare(p, x.untyped_data(), type);

  const int64_t strips = ceil_div(p.columns, kColumns);
  const int64_t worth = std::max<int64_t>(1, p.stored * p.columns * ceil_div(p.rows, kRows) / kBytesPerThread);
  const int64_t threads = std::min({worth, strips, std::max<int64_t>(1, pool.num_threads())});
  const int64_t chunks = threads == 1 ? 1 : std::min(strips, threads * kChunksPerThread);
  kernel::parallel_for(pool, threads, chunks, [&](int64_t chunk) {
    for (int64_t i = chunk * strips / chunks; i < (chunk + 1) * strips / chunks; ++i) multiply_strip(p, i);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantMatmul, quant_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<RowScales>()
                                  .Arg<Weights>()
                                  .Arg<Scales>()
                                  .Ret<ffi::AnyBuffer>());
