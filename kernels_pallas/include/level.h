// The registers and the few instructions of the level that the compiler's flags name; kernels are written in these
// names alone.
//
//   AVX-512         16 lanes; with VNNI four products of bytes at once, with BF16 two products of bfloat16
//   AVX2 and FMA    8 lanes; with AVX-VNNI four products of bytes at once
//   Arm             4 lanes; with dot products four products of bytes at once
//   anything else   4 lanes, through the compiler's own vectors

#ifndef KERNELS_PALLAS_LEVEL_H_
#define KERNELS_PALLAS_LEVEL_H_

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// Loops over the registers of a block are unrolled before sums are given registers. Sums are of the type that the
// instructions have: GCC keeps an array that is cast in memory and stores it in every step.
#define KERNEL_UNROLL _Pragma("GCC unroll 32")

namespace kernel {

#if defined(__AVX512F__)
typedef __m512 Floats;
typedef __m512i Ints;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
typedef __m256 Floats;
typedef __m256i Ints;
constexpr int kRegisters = 16;
#else
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
#if defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
#endif
constexpr int kLanes = sizeof(Floats) / sizeof(float);

// Four products of bytes are added in one instruction; on x86 the first factor is unsigned.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define KERNEL_BYTE_PRODUCTS 1
constexpr bool kUnsignedBytes = true;
#elif defined(__ARM_FEATURE_DOTPROD)
#define KERNEL_BYTE_PRODUCTS 1
constexpr bool kUnsignedBytes = false;
#endif

template <typename V>
inline V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Floats load(const float* p) { return load_as<Floats>(p); }
inline Floats widen(const float* p) { return load(p); }
inline Ints load_ints(const void* p) { return load_as<Ints>(p); }
inline void store(void* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline void store(void* p, Ints v) { std::memcpy(p, &v, sizeof v); }
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// Has v computed before anything behind this that has to be. GCC else asks for all operands of a block first, and keeps
// its sums in memory for want of registers.
template <typename V>
inline void settle(V& v) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(v));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(v));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(v));
#endif
}

#if defined(__AVX512F__)

inline Floats broadcast(float a) { return _mm512_set1_ps(a); }
inline Ints broadcast(int32_t a) { return _mm512_set1_epi32(a); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints flip(Ints v, uint8_t bits) { return _mm512_xor_si512(v, _mm512_set1_epi8(static_cast<char>(bits))); }
inline Ints mask(Ints v, uint8_t bits) { return _mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(bits))); }
inline Ints left16(Ints v, int bits) { return _mm512_slli_epi16(v, bits); }
inline Ints right16(Ints v, int bits) { return _mm512_srai_epi16(v, bits); }
inline Ints multiply_pairs(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
inline Floats widen(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(p)), 16));
}
inline Floats widen(const int8_t* p) { return to_floats(_mm512_cvtepi8_epi32(load_as<__m128i>(p))); }
inline Floats widen_halves(const uint16_t* p) { return _mm512_cvtph_ps(load_as<__m256i>(p)); }
inline Floats widen_low(const int8_t* p) {
  return to_floats(_mm512_srai_epi32(_mm512_slli_epi32(_mm512_cvtepi8_epi32(load_as<__m128i>(p)), 28), 28));
}
inline Floats widen_high(const int8_t* p) {
  return to_floats(_mm512_srai_epi32(_mm512_cvtepi8_epi32(load_as<__m128i>(p)), 4));
}
inline Ints pick(const uint8_t (&table)[16], Ints places) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_as<__m128i>(table)), places);
}
inline Ints low_bytes(Ints a, Ints b) { return _mm512_unpacklo_epi8(a, b); }
inline Ints high_bytes(Ints a, Ints b) { return _mm512_unpackhi_epi8(a, b); }
inline Ints low_words(Ints a, Ints b) { return _mm512_unpacklo_epi16(a, b); }
inline Ints high_words(Ints a, Ints b) { return _mm512_unpackhi_epi16(a, b); }
// Interleaving works in lanes of 128 bits: register i of four comes to hold columns 16 j + 4 i to 16 j + 4 i + 3
// in lane j. Transposing the lanes puts them in order, and back.
inline void lanes_in_order(Floats (&v)[4]) {
  const Floats a = _mm512_shuffle_f32x4(v[0], v[1], 0x88), b = _mm512_shuffle_f32x4(v[0], v[1], 0xdd);
  const Floats c = _mm512_shuffle_f32x4(v[2], v[3], 0x88), d = _mm512_shuffle_f32x4(v[2], v[3], 0xdd);
  v[0] = _mm512_shuffle_f32x4(a, c, 0x88);
  v[1] = _mm512_shuffle_f32x4(b, d, 0x88);
  v[2] = _mm512_shuffle_f32x4(a, c, 0xdd);
  v[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}
inline void lanes_interleaved(Floats (&v)[4]) { lanes_in_order(v); }

#elif defined(__AVX2__)

inline Floats broadcast(float a) { return _mm256_set1_ps(a); }
inline Ints broadcast(int32_t a) { return _mm256_set1_epi32(a); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints flip(Ints v, uint8_t bits) { return _mm256_xor_si256(v, _mm256_set1_epi8(static_cast<char>(bits))); }
inline Ints mask(Ints v, uint8_t bits) { return _mm256_and_si256(v, _mm256_set1_epi8(static_cast<char>(bits))); }
inline Ints left16(Ints v, int bits) { return _mm256_slli_epi16(v, bits); }
inline Ints right16(Ints v, int bits) { return _mm256_srai_epi16(v, bits); }
inline Ints multiply_pairs(Ints a, Ints b) { return _mm256_madd_epi16(a, b); }
inline Floats widen(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_as<__m128i>(p)), 16));
}
inline Ints widened_bytes(const int8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Floats widen(const int8_t* p) { return to_floats(widened_bytes(p)); }
inline Floats widen_halves(const uint16_t* p) { return _mm256_cvtph_ps(load_as<__m128i>(p)); }
inline Floats widen_low(const int8_t* p) {
  return to_floats(_mm256_srai_epi32(_mm256_slli_epi32(widened_bytes(p), 28), 28));
}
inline Floats widen_high(const int8_t* p) { return to_floats(_mm256_srai_epi32(widened_bytes(p), 4)); }
inline Ints pick(const uint8_t (&table)[16], Ints places) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_as<__m128i>(table)), places);
}
inline Ints low_bytes(Ints a, Ints b) { return _mm256_unpacklo_epi8(a, b); }
inline Ints high_bytes(Ints a, Ints b) { return _mm256_unpackhi_epi8(a, b); }
inline Ints low_words(Ints a, Ints b) { return _mm256_unpacklo_epi16(a, b); }
inline Ints high_words(Ints a, Ints b) { return _mm256_unpackhi_epi16(a, b); }
// Interleaving works in lanes of 128 bits: register i of four comes to hold columns 4 i to 4 i + 3 in its first
// lane and 16 + 4 i to 16 + 4 i + 3 in its second.
inline void lanes_in_order(Floats (&v)[4]) {
  const Floats a = v[0], b = v[1], c = v[2], d = v[3];
  v[0] = _mm256_permute2f128_ps(a, b, 0x20);
  v[1] = _mm256_permute2f128_ps(c, d, 0x20);
  v[2] = _mm256_permute2f128_ps(a, b, 0x31);
  v[3] = _mm256_permute2f128_ps(c, d, 0x31);
}
inline void lanes_interleaved(Floats (&v)[4]) {
  const Floats a = v[0], b = v[1], c = v[2], d = v[3];
  v[0] = _mm256_permute2f128_ps(a, c, 0x20);
  v[1] = _mm256_permute2f128_ps(a, c, 0x31);
  v[2] = _mm256_permute2f128_ps(b, d, 0x20);
  v[3] = _mm256_permute2f128_ps(b, d, 0x31);
}

#else

typedef int16_t Words __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

inline Floats broadcast(float a) { return Floats{a, a, a, a}; }
inline Ints broadcast(int32_t a) { return Ints{a, a, a, a}; }
inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
inline Ints add(Ints a, Ints b) { return a + b; }
inline Ints flip(Ints v, uint8_t bits) { return (Ints)((Bytes)v ^ bits); }
inline Ints mask(Ints v, uint8_t bits) { return (Ints)((Bytes)v & bits); }
inline Ints left16(Ints v, int bits) { return (Ints)((Words)v << bits); }
inline Ints right16(Ints v, int bits) { return (Ints)((Words)v >> bits); }
inline Floats widen(const uint16_t* p) {
  return (Floats)(Ints{p[0] << 16, p[1] << 16, p[2] << 16, static_cast<int32_t>(static_cast<uint32_t>(p[3]) << 16)});
}
inline Ints widened_bytes(const int8_t* p) { return Ints{p[0], p[1], p[2], p[3]}; }
inline Floats widen(const int8_t* p) { return to_floats(widened_bytes(p)); }
inline Floats widen_low(const int8_t* p) { return to_floats((widened_bytes(p) << 28) >> 28); }
inline Floats widen_high(const int8_t* p) { return to_floats(widened_bytes(p) >> 4); }
inline void lanes_in_order(Floats (&)[4]) {}
inline void lanes_interleaved(Floats (&)[4]) {}

#if defined(__ARM_NEON)
inline Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats widen_halves(const uint16_t* p) { return vcvt_f32_f16(load_as<float16x4_t>(p)); }
inline Ints pick(const uint8_t (&table)[16], Ints places) {
  return (Ints)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)places);
}
inline Ints multiply_pairs(Ints a, Ints b) {
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  return vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}
inline Ints low_bytes(Ints a, Ints b) { return (Ints)vzip1q_s8((int8x16_t)a, (int8x16_t)b); }
inline Ints high_bytes(Ints a, Ints b) { return (Ints)vzip2q_s8((int8x16_t)a, (int8x16_t)b); }
inline Ints low_words(Ints a, Ints b) { return (Ints)vzip1q_s16((int16x8_t)a, (int16x8_t)b); }
inline Ints high_words(Ints a, Ints b) { return (Ints)vzip2q_s16((int16x8_t)a, (int16x8_t)b); }
#else
inline Floats multiply_add(Floats a, Floats b, Floats c) { return c + a * b; }
inline float widen_half(uint16_t half) {
  const uint32_t rest = half & 0x7fff;
  float value;
  if (rest < 0x400) {
    value = static_cast<float>(rest) * 0x1p-24f;  // subnormal: such float32 numbers may count as zero
  } else {
    const uint32_t bits = (rest << 13) + (rest < 0x7c00 ? 112u << 23 : 224u << 23);
    std::memcpy(&value, &bits, sizeof value);
  }
  return half & 0x8000 ? -value : value;
}
inline Floats widen_halves(const uint16_t* p) {
  return Floats{widen_half(p[0]), widen_half(p[1]), widen_half(p[2]), widen_half(p[3])};
}
inline Ints pick(const uint8_t (&table)[16], Ints places) {
  Bytes bytes = (Bytes)places;
  for (int i = 0; i < 16; ++i) bytes[i] = table[bytes[i]];
  return (Ints)bytes;
}
#if defined(__SSE2__)
inline Ints multiply_pairs(Ints a, Ints b) { return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b); }
inline Ints low_bytes(Ints a, Ints b) { return (Ints)_mm_unpacklo_epi8((__m128i)a, (__m128i)b); }
inline Ints high_bytes(Ints a, Ints b) { return (Ints)_mm_unpackhi_epi8((__m128i)a, (__m128i)b); }
inline Ints low_words(Ints a, Ints b) { return (Ints)_mm_unpacklo_epi16((__m128i)a, (__m128i)b); }
inline Ints high_words(Ints a, Ints b) { return (Ints)_mm_unpackhi_epi16((__m128i)a, (__m128i)b); }
#else
inline Ints multiply_pairs(Ints a, Ints b) {
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
}
template <typename T>
inline Ints zipped(Ints a, Ints b, int first) {
  T x[16 / sizeof(T)], y[16 / sizeof(T)], z[16 / sizeof(T)];
  std::memcpy(x, &a, 16), std::memcpy(y, &b, 16);
  for (unsigned i = 0; i < 8 / sizeof(T); ++i) z[2 * i] = x[first + i], z[2 * i + 1] = y[first + i];
  return load_as<Ints>(z);
}
inline Ints low_bytes(Ints a, Ints b) { return zipped<int8_t>(a, b, 0); }
inline Ints high_bytes(Ints a, Ints b) { return zipped<int8_t>(a, b, 8); }
inline Ints low_words(Ints a, Ints b) { return zipped<int16_t>(a, b, 0); }
inline Ints high_words(Ints a, Ints b) { return zipped<int16_t>(a, b, 4); }
#endif
#endif

#endif

inline Ints subtract_bytes(Ints v, uint8_t number) {
  typedef uint8_t Numbers __attribute__((vector_size(sizeof(Ints))));
  return (Ints)((Numbers)v - number);
}

#if defined(__AVX512VNNI__)
inline Ints multiply_quads(Ints bytes, Ints x, Ints sum) { return _mm512_dpbusd_epi32(sum, bytes, x); }
#elif defined(__AVXVNNI__)
inline Ints multiply_quads(Ints bytes, Ints x, Ints sum) { return _mm256_dpbusd_avx_epi32(sum, bytes, x); }
#elif defined(__ARM_FEATURE_DOTPROD)
inline Ints multiply_quads(Ints bytes, Ints x, Ints sum) {
  return vdotq_s32(sum, vreinterpretq_s8_s32(bytes), vreinterpretq_s8_s32(x));
}
#endif

// Where bytes have no instruction of their own, products of nibbles with bytes still have: two are added in 16 bits.
#if !defined(KERNEL_BYTE_PRODUCTS) && defined(__AVX512F__)
#define KERNEL_NIBBLE_PRODUCTS 1
inline Ints multiply_nibbles(Ints nibbles, Ints x, Ints sum) {
  return _mm512_add_epi16(sum, _mm512_maddubs_epi16(nibbles, x));
}
#elif !defined(KERNEL_BYTE_PRODUCTS) && defined(__AVX2__)
#define KERNEL_NIBBLE_PRODUCTS 1
inline Ints multiply_nibbles(Ints nibbles, Ints x, Ints sum) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(nibbles, x));
}
#endif

typedef int32_t IntLanes __attribute__((vector_size(sizeof(Floats))));

// a where it is larger than b, else b: b where one of them is nan.
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
inline Floats magnitude(Floats v) { return (Floats)((IntLanes)v & 0x7fffffff); }

// a in the lanes whose bits are set, b in the others.
inline Floats choose(uint32_t lanes, Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_mask_blend_ps(static_cast<__mmask16>(lanes), b, a);
#else
  IntLanes bit;
  for (int i = 0; i < kLanes; ++i) bit[i] = 1 << i;
  return (bit & static_cast<int32_t>(lanes)) != 0 ? a : b;
#endif
}

// The largest of a register's numbers, of which none is nan.
inline float largest(Floats v) {
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}

// The transpose of a block of kLanes x kLanes.
inline void transpose(Floats (&rows)[kLanes]) {
#if defined(__AVX512F__)
  Floats other[kLanes];
  KERNEL_UNROLL
  for (int i = 0; i < kLanes; i += 2) {
    other[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    other[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  KERNEL_UNROLL
  for (int i = 0; i < kLanes; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(other[i + j]), b = _mm512_castps_pd(other[i + j + 2]);
      rows[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      rows[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  KERNEL_UNROLL
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < kLanes; half += 8) {
      other[half + i] = _mm512_shuffle_f32x4(rows[half + i], rows[half + i + 4], 0x88);
      other[half + i + 4] = _mm512_shuffle_f32x4(rows[half + i], rows[half + i + 4], 0xdd);
    }
  }
  KERNEL_UNROLL
  for (int i = 0; i < 8; ++i) {
    rows[i] = _mm512_shuffle_f32x4(other[i], other[i + 8], 0x88);
    rows[i + 8] = _mm512_shuffle_f32x4(other[i], other[i + 8], 0xdd);
  }
#elif defined(__AVX2__)
  Floats other[kLanes];
  KERNEL_UNROLL
  for (int i = 0; i < kLanes; i += 2) {
    other[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    other[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  KERNEL_UNROLL
  for (int i = 0; i < kLanes; i += 4) {
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm256_shuffle_ps(other[i + j], other[i + j + 2], 0x44);
      rows[i + 2 * j + 1] = _mm256_shuffle_ps(other[i + j], other[i + j + 2], 0xee);
    }
  }
  KERNEL_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Floats a = rows[i], b = rows[i + 4];
    rows[i] = _mm256_permute2f128_ps(a, b, 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(a, b, 0x31);
  }
#else
  const Floats a = rows[0], b = rows[1], c = rows[2], d = rows[3];
  for (int i = 0; i < kLanes; ++i) rows[i] = Floats{a[i], b[i], c[i], d[i]};
#endif
}

// The sum of a register's numbers, in one order.
inline float sum_lanes(Floats v) {
#if defined(__AVX512F__)
  const __m256 eight = _mm512_castps512_ps256(v) + _mm512_extractf32x8_ps(v, 1);
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
#elif defined(__AVX2__)
  const __m128 four = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1);
#else
  const Floats four = v;
#endif
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Four registers of bytes, each of a row, to four whose words of 32 bits hold the four bytes of a column.
inline void interleave(const Ints (&rows)[4], Ints (&quads)[4]) {
  const Ints a = low_bytes(rows[0], rows[1]), b = high_bytes(rows[0], rows[1]);
  const Ints c = low_bytes(rows[2], rows[3]), d = high_bytes(rows[2], rows[3]);
  quads[0] = low_words(a, c), quads[1] = high_words(a, c), quads[2] = low_words(b, d), quads[3] = high_words(b, d);
}

}  // namespace kernel

#endif  // KERNELS_PALLAS_LEVEL_H_
