// (x * x_scale) @ (w * w_scale) for 8- and 4-bit weights on a CPU, called by XLA through its foreign function
// interface. The arguments are those of quant_matmul in the Python package; products.h tells how they are multiplied.
//
// Which arithmetic is compiled follows from the compiler's flags, which the Python side chooses by the processor's
// features. Integer activations are multiplied exactly, in int32:
//   VNNI, Arm dot products   four products of bytes in one instruction
//   else                     numbers widened to 16 bits, whose products are added in pairs; of 4-bit weights, where
//                            AVX2 or AVX-512 multiply bytes by bytes, sums of up to 16 products in 16 bits
// Of other activations:
//   AVX-512 BF16             bfloat16: sums of two products in float32
//   else                     float32 multiply-adds

#include <cstdint>
#include <cstring>

#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using kernel::Floats;
using kernel::Ints;
using kernel::kLanes;
using kernel::kStrip;
using kernel::Span;

using Weights = ffi::Buffer<ffi::S8, 2>;
using Scales = ffi::Buffer<ffi::F32, 2>;
using RowScales = ffi::Buffer<ffi::F32, 1>;

constexpr int kByteColumns = sizeof(Ints);  // columns of a register of bytes

const int8_t* bytes(const char* row) { return reinterpret_cast<const int8_t*>(row); }

// ---- float activations ----

struct ByteReader {
  static constexpr int kTerms = 1;
  static void widen_row(const char* row, int32_t* to) {
    for (int c = 0; c < kStrip; c += kLanes) kernel::store(to + c, kernel::widen(bytes(row) + c));
  }
};

struct NibbleReader {
  static constexpr int kTerms = 2;
  static void widen_row(const char* row, int32_t* to) {
    for (int c = 0; c < kStrip; c += kLanes) {
      kernel::store(to + c, kernel::widen_low(bytes(row) + c));
      kernel::store(to + kStrip + c, kernel::widen_high(bytes(row) + c));
    }
  }
};

#if defined(__AVX512BF16__)
// Two rows of w as pairs of bfloat16, which hold 8-bit integers exactly.
template <bool packed>
struct BfloatTerms : kernel::FloatSums {
  static constexpr int kStep = packed ? 1 : 2, kTerms = 1, kWordNumbers = 2;
  static Floats multiply(Ints pair, Ints word, Floats sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)pair, (__m512bh)word);
  }
  static Ints pair(Floats even, Floats odd) {
    const Ints low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    return _mm512_or_si512(low, _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32(0xffff0000)));
  }
  static void lay_out(const char* const (&rows)[kStep], int32_t* to) {
    for (int c = 0; c < kStrip; c += kLanes) {
      const int8_t* at = bytes(rows[0]) + c;
      kernel::store(to + c, packed ? pair(kernel::widen_low(at), kernel::widen_high(at))
                                   : pair(kernel::widen(at), kernel::widen(bytes(rows[kStep - 1]) + c)));
    }
  }
  template <int R, int V>
  static void accumulate(Floats (&sums)[R][V], const int32_t* numbers, int64_t terms, const int32_t* x,
                         const int32_t*, int64_t) {
    kernel::add_terms<BfloatTerms, R, V>(sums, numbers, terms, x);
  }
};
#endif

// ---- integer activations ----

// What kinds of int32 sums share.
struct IntSums {
  using Sum = Ints;
  using Number = int32_t;
  static constexpr bool kInterleaved = true;
  static constexpr int kStep = 4;
  static Floats floats(Sum sum) { return kernel::to_floats(sum); }
};

// Calls body(quads, their place in a term) for the columns of four rows of w.
template <typename Body>
inline void for_quads(const char* const (&rows)[4], const Body& body) {
  for (int c = 0; c < kStrip; c += kByteColumns) {
    Ints own[4], quads[4];
    KERNEL_UNROLL
    for (int i = 0; i < 4; ++i) own[i] = kernel::load_ints(rows[i] + c);
    kernel::interleave(own, quads);
    KERNEL_UNROLL
    for (int i = 0; i < 4; ++i) body(quads[i], c + i * kLanes);
  }
}

// Quads of nibbles, 8 larger than they are: those of even and those of odd rows.
inline void nibble_quads(const char* const (&rows)[4], int32_t* to) {
  for_quads(rows, [&](Ints quads, int place) {
    const Ints larger = kernel::flip(quads, 0x88);
    kernel::store(to + place, kernel::mask(larger, 0x0f));
    kernel::store(to + kStrip + place, kernel::mask(kernel::right16(larger, 4), 0x0f));
  });
}

// The words of x that meet quads: the four numbers of a step, of 4-bit weights the even ones and the odd ones.
template <bool packed>
inline void quad_words(const int8_t* numbers, int32_t* words) {
  if (!packed) {
    std::memcpy(words, numbers, 4);
    return;
  }
  uint64_t all;
  std::memcpy(&all, numbers, 8);
  for (int odd = 0; odd < 2; ++odd) {
    uint64_t v = all >> (8 * odd) & 0x00ff00ff00ff00ff;
    v = (v | v >> 8) & 0x0000ffff0000ffff;
    words[odd] = static_cast<int32_t>(v | v >> 16);
  }
}

#if defined(KERNEL_BYTE_PRODUCTS)
template <bool packed>
struct ByteTerms : IntSums {
  static constexpr int kTerms = packed ? 2 : 1;
  static constexpr int64_t kTileUnit = 8;
  // An unsigned factor is larger than the weight by this.
  static constexpr int kLarger = !kernel::kUnsignedBytes ? 0 : packed ? 8 : 128;
  static constexpr int64_t starts(int64_t) { return kLarger ? 1 : 0; }
  static constexpr int64_t start_of(int64_t) { return 0; }
  static Ints first(const int32_t* start) { return kernel::broadcast(kLarger ? *start : 0); }
  static Ints multiply(Ints quads, Ints word, Ints sum) { return kernel::multiply_quads(quads, word, sum); }
  static void lay_out(const char* const (&rows)[4], int32_t* to) {
    if constexpr (!packed) {
      for_quads(rows, [&](Ints quads, int place) {
        kernel::store(to + place, kLarger ? kernel::flip(quads, 0x80) : quads);
      });
    } else {
      nibble_quads(rows, to);
      // Where bytes are signed, nibbles become what they are again.
      for (int c = 0; kLarger == 0 && c < 2 * kStrip; c += kLanes) {
        kernel::store(to + c, kernel::subtract_bytes(kernel::load_ints(to + c), 8));
      }
    }
  }
  static void words(const int8_t* numbers, int32_t* to) { quad_words<packed>(numbers, to); }
  static void start(const int8_t* numbers, int64_t count, int32_t* to) {
    if (kLarger == 0) return;
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += numbers[i];
    *to = -kLarger * sum;
  }
  template <int R, int V>
  static void accumulate(Ints (&sums)[R][V], const int32_t* numbers, int64_t terms, const int32_t* x,
                         const int32_t*, int64_t) {
    kernel::add_terms<ByteTerms, R, V>(sums, numbers, terms, x);
  }
};
#else
// Pairs of rows 0 and 2 and of rows 1 and 3 of a step, in 16 bits; of 4-bit weights first those of the low nibbles.
template <bool packed>
struct PairTerms : IntSums {
  static constexpr int kTerms = packed ? 4 : 2;
  static constexpr int64_t kTileUnit = 8;
  static constexpr int64_t starts(int64_t) { return 0; }
  static constexpr int64_t start_of(int64_t) { return 0; }
  static Ints first(const int32_t*) { return kernel::broadcast(0); }
  static Ints multiply(Ints pairs, Ints word, Ints sum) {
    return kernel::add(sum, kernel::multiply_pairs(pairs, word));
  }
  static void lay_out(const char* const (&rows)[4], int32_t* to) {
    using kernel::left16;
    using kernel::right16;
    for_quads(rows, [&](Ints quads, int place) {
      if (packed) {
        kernel::store(to + place, right16(left16(quads, 12), 12));
        kernel::store(to + kStrip + place, right16(left16(quads, 4), 12));
        kernel::store(to + 2 * kStrip + place, right16(left16(quads, 8), 12));
        kernel::store(to + 3 * kStrip + place, right16(quads, 12));
      } else {
        kernel::store(to + place, right16(left16(quads, 8), 8));
        kernel::store(to + kStrip + place, right16(quads, 8));
      }
    });
  }
  static void words(const int8_t* numbers, int32_t* to) {
    constexpr int apart = packed ? 4 : 2;
    constexpr int first[4] = {0, packed ? 2 : 1, 1, 3};
    for (int i = 0; i < kTerms; ++i) {
      const uint32_t high = static_cast<uint32_t>(numbers[first[i] + apart]) << 16;
      to[i] = static_cast<int32_t>(high | static_cast<uint16_t>(numbers[first[i]]));
    }
  }
  static void start(const int8_t*, int64_t, int32_t*) {}
  template <int R, int V>
  static void accumulate(Ints (&sums)[R][V], const int32_t* numbers, int64_t terms, const int32_t* x,
                         const int32_t*, int64_t) {
    kernel::add_terms<PairTerms, R, V>(sums, numbers, terms, x);
  }
};
#endif

#if defined(KERNEL_NIBBLE_PRODUCTS)
// Quads of nibbles 8 larger than they are, whose products with x are at most 2 x 15 x 128 for each half of a word. Sums
// of a segment stay in 16 bits: they begin with what takes the 8 off again, so that they end within 16 x 8 x 128, and
// what they pass over on the way is lost and won again.
struct NibbleTerms : IntSums {
  static constexpr int kTerms = 2;
  static constexpr int64_t kSegment = 8;  // terms
  static constexpr int64_t kTileUnit = 4 * kSegment / kTerms;
  static constexpr int64_t starts(int64_t terms) { return kernel::ceil_div(terms, kSegment); }
  static constexpr int64_t start_of(int64_t term) { return term / kSegment; }
  static Ints first(const int32_t*) { return kernel::broadcast(0); }
  static Ints multiply(Ints nibbles, Ints word, Ints sum) { return kernel::multiply_nibbles(nibbles, word, sum); }
  static void lay_out(const char* const (&rows)[4], int32_t* to) { nibble_quads(rows, to); }
  static void words(const int8_t* numbers, int32_t* to) { quad_words<true>(numbers, to); }
  static void start(const int8_t* numbers, int64_t count, int32_t* to) {
    constexpr int64_t size = 4 * kSegment;
    for (int64_t i = 0; i < count; i += size, ++to) {
      // The halves of a word meet the first and the second four of eight numbers.
      int32_t sums[2] = {};
      for (int64_t j = i; j < std::min(i + size, count); ++j) sums[j / 4 % 2] -= 8 * numbers[j];
      *to = static_cast<int32_t>(static_cast<uint32_t>(sums[1]) << 16 | static_cast<uint16_t>(sums[0]));
    }
  }
  template <int R, int V>
  static void accumulate(Ints (&sums)[R][V], const int32_t* numbers, int64_t terms, const int32_t* x,
                         const int32_t* starts, int64_t start_stride) {
    const Ints ones = kernel::broadcast(0x00010001);
    for (int64_t t = 0; t < terms; t += kSegment, numbers += kSegment * kStrip) {
      Ints narrow[R][V];
      KERNEL_UNROLL
      for (int r = 0; r < R; ++r) {
        const Ints start = kernel::broadcast(starts[r * start_stride + t / kSegment]);
        KERNEL_UNROLL
        for (int v = 0; v < V; ++v) narrow[r][v] = start;
      }
      kernel::add_terms<NibbleTerms, R, V>(narrow, numbers, std::min(kSegment, terms - t), x + t * R);
      KERNEL_UNROLL
      for (int r = 0; r < R; ++r) {
        KERNEL_UNROLL
        for (int v = 0; v < V; ++v) {
          sums[r][v] = kernel::add(sums[r][v], kernel::multiply_pairs(narrow[r][v], ones));
        }
      }
    }
  }
};
#endif

// ---- the call ----

template <class Kind, typename Pool>
void multiply_integers(Pool& pool, const kernel::Product& p, const int8_t* x) {
  const int64_t k_row = p.packed_rows(), k = p.stored * k_row;
  kernel::Multiplication<Kind> product(p);
  product.prepare([&](int64_t row, const Span& span, int32_t* words, int64_t apart, int32_t* starts) {
    const int8_t* from = x + row * k + span.first * k_row;
    const int64_t count = span.count * k_row, step = Kind::kStep * k_row;
    for (int64_t i = 0; i < count; i += step) {
      int8_t rest[8] = {};
      const bool whole = i + step <= count;
      if (!whole) std::memcpy(rest, from + i, count - i);
      int32_t own[Kind::kTerms];
      Kind::words(whole ? from + i : rest, own);
      for (int t = 0; t < Kind::kTerms; ++t, words += apart) *words = own[t];
    }
    Kind::start(from, count, starts);
  });
  product.run(pool);
}

template <class Kind, typename Pool, typename T>
void multiply_floats(Pool& pool, const kernel::Product& p, const T* x) {
  const int64_t k_row = p.packed_rows(), k = p.stored * k_row;
  kernel::Multiplication<Kind> product(p);
  product.prepare([&](int64_t row, const Span& span, int32_t* words, int64_t apart, int32_t*) {
    kernel::to_words<Kind::kWordNumbers>(x + row * k + span.first * k_row, span.count * k_row, words, apart);
  });
  product.run(pool);
}

template <bool packed, typename Pool>
void multiply(Pool& pool, const kernel::Product& p, const int8_t* x) {
#if defined(KERNEL_BYTE_PRODUCTS)
  multiply_integers<ByteTerms<packed>>(pool, p, x);
#elif defined(KERNEL_NIBBLE_PRODUCTS)
  multiply_integers<std::conditional_t<packed, NibbleTerms, PairTerms<false>>>(pool, p, x);
#else
  multiply_integers<PairTerms<packed>>(pool, p, x);
#endif
}

template <bool packed>
using WideTerms = kernel::FloatTerms<std::conditional_t<packed, NibbleReader, ByteReader>>;

template <bool packed, typename Pool>
void multiply(Pool& pool, const kernel::Product& p, const uint16_t* x) {
#if defined(__AVX512BF16__)
  multiply_floats<BfloatTerms<packed>>(pool, p, x);
#else
  multiply_floats<WideTerms<packed>>(pool, p, x);
#endif
}

template <bool packed, typename Pool>
void multiply(Pool& pool, const kernel::Product& p, const float* x) {
  multiply_floats<WideTerms<packed>>(pool, p, x);
}

template <bool packed>
void multiply(ffi::ThreadPool& pool, const kernel::Product& p, const ffi::AnyBuffer& x) {
  switch (x.element_type()) {
    case ffi::S8: return multiply<packed>(pool, p, x.typed_data<int8_t>());
    case ffi::BF16: return multiply<packed>(pool, p, static_cast<const uint16_t*>(x.untyped_data()));
    default: return multiply<packed>(pool, p, x.typed_data<float>());
  }
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
  kernel::Product p;
  p.rows = x.dimensions()[0];
  p.k = x.dimensions()[1];
  p.stored = w.dimensions()[0];
  p.columns = w.dimensions()[1];
  p.groups = w_scale.dimensions()[0];
  p.w = reinterpret_cast<const char*>(w.typed_data());
  p.column_bytes = 1;
  p.scales = w_scale.typed_data();
  p.x_scales = type == ffi::S8 ? x_scale.typed_data() : nullptr;
  p.out = out->untyped_data();
  p.out_bfloat16 = out_type == ffi::BF16;
  if (p.stored == p.k) {
    multiply<false>(pool, p, x);
  } else {
    multiply<true>(pool, p, x);
  }
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
