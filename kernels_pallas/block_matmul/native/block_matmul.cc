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

#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using kernel::broadcast;
using kernel::ceil_div;
using kernel::Floats;
using kernel::IntLanes;
using kernel::Ints;
using kernel::kLanes;
using kernel::load;
using kernel::load_ints;
using kernel::mask;
using kernel::multiply_add;
using kernel::right16;
using kernel::store;

using Blocks = ffi::Buffer<ffi::U8, 3>;
using Sizes = ffi::Buffer<ffi::S32, 1>;

constexpr int kTile = 16;                 // columns
constexpr int kVectors = kTile / kLanes;  // registers of a quad of rows: four bytes for each column of a tile
constexpr int kGroup = 32;                // numbers of x that share a scale
constexpr int kQuads = kGroup / 4;
constexpr int kStepGroups = 8;
constexpr int kQuadBytes = 4 * kTile;
constexpr int64_t kChunksPerThread = 8;

// What forms.py says of a form.
struct Form {
  int bits;       // of a number
  int group;      // numbers that share a scale: 16 or 32
  int unit;       // numbers that share a float16 scale, 32 or 256: what lies together
  bool mins;      // a number is scale * q - min, else scale * (q - centre)
  bool codebook;  // q is the place of a number of 8 bits

  int width() const { return codebook ? 8 : bits; }
  int centre() const { return 1 << (width() - 1); }
  bool two_level() const { return unit > kGroup; }
  int64_t packed_group() const { return kGroup * bits / 8 * kTile; }
  int64_t unit_bytes() const {
    const int64_t scales = two_level() ? 2 + unit / group : 2;
    return unit / kGroup * packed_group() + kTile * scales * (mins ? 2 : 1);
  }
};

// The numbers that a place in IQ4_NL means, 128 larger than they are.
constexpr uint8_t kCodebook[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

struct Problem {
  Form form;
  int64_t rows, k, columns;
  const uint8_t* w;  // [tiles, K / unit, unit_bytes]
  void* out;         // [rows, columns]
  bool out_bfloat16;

  int64_t tiles() const { return ceil_div(columns, kTile); }
  int64_t tile_bytes() const { return k / form.unit * form.unit_bytes(); }
};

// ---- unpacking ----

// v with bit `from` of every byte at `to`; other bits are arbitrary.
inline Ints moved(Ints v, int from, int to) {
  return from > to ? right16(v, from - to) : from < to ? kernel::left16(v, to - from) : v;
}
inline Ints either(Ints a, Ints b) { return (Ints)((IntLanes)a | (IntLanes)b); }

// Calls put(quad, vector, bytes) for the numbers of a group of 32, unsigned.
template <int bits, typename Put>
inline void unpack_group(const uint8_t* from, const Put& put) {
  constexpr int base = bits == 8 ? 8 : bits >= 4 ? 4 : 2, more = bits - base;
  constexpr int64_t base_bytes = kGroup * base / 8 * kTile;
  KERNEL_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    const uint8_t* at = from + v * sizeof(Ints);
    Ints low = {}, high = {};
    KERNEL_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      if constexpr (base == 8) {
        put(q, v, load_ints(at + q * kQuadBytes));
        continue;
      }
      Ints number;
      if constexpr (base == 4) {
        low = load_ints(at + q % 4 * kQuadBytes);
        number = mask(q < 4 ? low : right16(low, 4), 0x0f);
      } else {
        if (q % 4 == 0) low = load_ints(at + q / 4 * kQuadBytes);
        number = mask(moved(low, q % 4 * 2, 0), 0x03);
      }
      if constexpr (more == 1) {
        if (q == 0) high = load_ints(at + base_bytes);
        number = either(number, mask(moved(high, q, base), 1 << base));
      } else if constexpr (more == 2) {
        if (q % 4 == 0) high = load_ints(at + base_bytes + q / 4 * kQuadBytes);
        number = either(number, mask(moved(high, q % 4 * 2, base), 3 << base));
      }
      put(q, v, number);
    }
  }
}

// The same, of numbers of 8 bits and of fewer.
template <typename Put>
inline void unpack_wide(const Form& form, const uint8_t* from, const Put& put) {
  if (!form.codebook) return unpack_group<8>(from, put);
  unpack_group<4>(from, [&](int q, int v, Ints places) { put(q, v, kernel::pick(kCodebook, places)); });
}
template <typename Put>
inline void unpack_narrow(const Form& form, const uint8_t* from, const Put& put) {
  switch (form.bits) {
    case 2: return unpack_group<2>(from, put);
    case 3: return unpack_group<3>(from, put);
    case 4: return unpack_group<4>(from, put);
    case 5: return unpack_group<5>(from, put);
    case 6: return unpack_group<6>(from, put);
  }
}

// Groups of a step with their scales; a number is scale * q + shift.
struct Scales {
  float scale[2 * kStepGroups][kTile], shift[2 * kStepGroups][kTile];
};

// Calls group(index in the step, packed numbers) and fills the scales, for groups [first, last) of 32 of a tile.
template <typename Group>
inline void for_step(const Form& form, const uint8_t* tile, int64_t first, int64_t last, Scales& scales,
                     const Group& group) {
  const int64_t packed = form.packed_group(), unit_bytes = form.unit_bytes();
  const int groups = form.unit / kGroup, per_group = kGroup / form.group;
  for (int64_t g = first; g < last; g += groups) {
    const uint8_t* unit = tile + g / groups * unit_bytes;
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(unit + groups * packed);
    const int8_t* fine = reinterpret_cast<const int8_t*>(halves + kTile * (form.mins ? 2 : 1));
    for (int i = 0; i < groups; ++i) {
      group(g - first + i, unit + i * packed);
      for (int j = 0; j < per_group; ++j) {
        const int64_t at = (g - first + i) * per_group + j;
        const int8_t* own = fine + (i * per_group + j) * kTile;
        for (int c = 0; c < kTile; c += kLanes) {
          Floats scale = kernel::widen_halves(halves + c);
          if (form.two_level()) scale *= kernel::widen(own + c);
          Floats shift;
          if (form.mins) {
            shift = kernel::widen_halves(halves + kTile + c);
            if (form.two_level()) shift *= kernel::widen(own + groups * per_group * kTile + c);
            // A file's block of one level adds its least number, one of two levels takes it off.
            if (form.two_level()) shift = broadcast(0.0f) - shift;
          } else {
            shift = scale * broadcast(-static_cast<float>(form.centre()));
          }
          store(scales.scale[at] + c, scale);
          store(scales.shift[at] + c, shift);
        }
      }
    }
  }
}

// ---- integers ----
//
// A kind says how a quad's bytes lie in a panel (kParts registers), which words of x they meet, and how they are summed.

#if defined(KERNEL_BYTE_PRODUCTS)
template <bool wide>
struct Kind {
  static constexpr int kParts = 1, kSums = 1, kWords = 1;
  static constexpr bool kHalves = false;
  static int start_factor(const Form& form) { return kernel::kUnsignedBytes ? form.centre() : 0; }
  static void put(const Form& form, Ints quads, Ints* to) {
    store(to, kernel::kUnsignedBytes ? quads : kernel::subtract_bytes(quads, form.centre()));
  }
  static void begin(Ints (&sums)[1], Ints start) { sums[0] = start; }
  static void add(Ints (&sums)[1], const Ints (&w)[1], const Ints (&x)[1]) {
    sums[0] = kernel::multiply_quads(w[0], x[0], sums[0]);
  }
  static Ints total(const Ints (&sums)[1]) { return sums[0]; }
};
#elif defined(KERNEL_NIBBLE_PRODUCTS)
template <bool wide>
struct Kind {
  static constexpr int kParts = wide ? 2 : 1, kSums = kParts, kWords = 1;
  static constexpr bool kHalves = true;
  // Of wide numbers the low nibble is as it is, and the high one 8 larger.
  static int start_factor(const Form& form) { return wide ? 8 : form.centre(); }
  static void put(const Form&, Ints quads, Ints* to) {
    if (wide) {
      store(to, mask(quads, 0x0f));
      store(to + 1, mask(right16(quads, 4), 0x0f));
    } else {
      store(to, quads);
    }
  }
  static void begin(Ints (&sums)[kSums], Ints start) {
    sums[0] = broadcast(0);
    sums[kSums - 1] = start;
  }
  static void add(Ints (&sums)[kSums], const Ints (&w)[kParts], const Ints (&x)[1]) {
    KERNEL_UNROLL
    for (int i = 0; i < kSums; ++i) sums[i] = kernel::multiply_nibbles(w[i], x[0], sums[i]);
  }
  static Ints total(const Ints (&sums)[kSums]) {
    const Ints low = kernel::multiply_pairs(sums[0], broadcast(0x00010001));
    if constexpr (!wide) return low;
    return kernel::add(low, kernel::multiply_pairs(sums[kSums - 1], broadcast(0x00100010)));
  }
};
#else
template <bool wide>
struct Kind {
  static constexpr int kParts = 2, kSums = 1, kWords = 2;
  static constexpr bool kHalves = false;
  static int start_factor(const Form&) { return 0; }
  static void put(const Form& form, Ints quads, Ints* to) {
    const Ints centred = kernel::subtract_bytes(quads, form.centre());
    store(to, right16(kernel::left16(centred, 8), 8));
    store(to + 1, right16(centred, 8));
  }
  static void begin(Ints (&sums)[1], Ints) { sums[0] = broadcast(0); }
  static void add(Ints (&sums)[1], const Ints (&w)[2], const Ints (&x)[2]) {
    KERNEL_UNROLL
    for (int i = 0; i < 2; ++i) sums[0] = kernel::add(sums[0], kernel::multiply_pairs(w[i], x[i]));
  }
  static Ints total(const Ints (&sums)[1]) { return sums[0]; }
};
#endif

// Rows of x as integers; those of a block of R rows lie together, [.., R].
struct IntegerRows {
  int64_t k, groups;       // of 32
  int64_t scaled;          // groups of w
  int words_a_quad;
  int32_t *words, *starts;
  float *scales, *sums;    // of a group of 32; of a group of w, of what is read of x, times that scale

  int32_t* words_at(int64_t first, int64_t size, int64_t group) const {
    return words + first * k / 4 * words_a_quad + group * kQuads * words_a_quad * size;
  }
  int32_t* starts_at(int64_t first, int64_t size, int64_t group) const { return starts + first * scaled + group * size; }
  float* scales_at(int64_t first, int64_t size, int64_t group) const { return scales + first * groups + group * size; }
  float* sums_at(int64_t first, int64_t size, int64_t group) const { return sums + first * scaled + group * size; }
};

// 32 numbers rounded to integers of at most 127 steps; the scale is not finite where one of them is not.
inline float round_group(const float* x, int32_t* integers) {
  IntLanes most = {};
  for (int i = 0; i < kGroup; i += kLanes) {
    const IntLanes size = (IntLanes)load(x + i) & 0x7fffffff;
    most = size > most ? size : most;
  }
  int32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits = std::max(bits, static_cast<int32_t>(most[i]));
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  if (bits >= 0x7f800000) {
    std::fill_n(integers, kGroup, 0);
    return std::numeric_limits<float>::quiet_NaN();
  }
  float scale = largest * (1.0f / 127);
  if (scale < std::numeric_limits<float>::min()) scale = 1.0f;
  // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, which is then what the bits are larger by.
  const Floats inverse = broadcast(1.0f / scale), shifter = broadcast(12582912.0f);
  for (int i = 0; i < kGroup; i += kLanes) {
    const IntLanes rounded = (IntLanes)(Floats)(load(x + i) * inverse + shifter) - 0x4b400000;
    store(integers + i, (Ints)rounded);
  }
  return scale;
}

template <class K>
void prepare_row(const IntegerRows& rows, const Form& form, const float* x, int64_t first, int64_t size, int64_t r) {
  const int per_group = kGroup / form.group, factor = K::start_factor(form);
  for (int64_t g = 0; g < rows.groups; ++g) {
    int32_t q[kGroup];
    const float scale = round_group(x + g * kGroup, q);
    rows.scales_at(first, size, g)[r] = scale;
    int32_t* words = rows.words_at(first, size, g) + r;
    for (int i = 0; i < kQuads; ++i) {
      const int32_t* own = q + 4 * i;
      const auto byte = [](int32_t v, int at) { return static_cast<uint32_t>(v & 0xff) << at; };
      const auto pair = [](int32_t a, int32_t b) { return static_cast<uint32_t>(b) << 16 | (a & 0xffff); };
      if (K::kWords == 1) {
        words[i * size] = static_cast<int32_t>(byte(own[0], 0) | byte(own[1], 8) | byte(own[2], 16) | byte(own[3], 24));
      } else {
        words[2 * i * size] = static_cast<int32_t>(pair(own[0], own[2]));
        words[(2 * i + 1) * size] = static_cast<int32_t>(pair(own[1], own[3]));
      }
    }
    for (int j = 0; j < per_group; ++j) {
      int32_t halves[2] = {};
      for (int i = 0; i < form.group; ++i) halves[i / 2 % 2] += q[j * form.group + i];
      const int64_t at = g * per_group + j;
      const int32_t low = -factor * halves[0], high = -factor * halves[1];
      rows.starts_at(first, size, at)[r] =
          K::kHalves ? static_cast<int32_t>(static_cast<uint32_t>(high) << 16 | (low & 0xffff)) : low + high;
      rows.sums_at(first, size, at)[r] = scale * static_cast<float>(halves[0] + halves[1]);
    }
  }
}

// Adds what R rows of x make of a step's groups [0, groups) of w to totals [R, kTile].
template <class K, int group, int R>
void multiply_integers(const Ints* panel, const Scales& scales, bool shifted, const IntegerRows& rows, int64_t row,
                       int64_t first_group, int64_t groups, float* totals) {
  constexpr int kMost = kernel::kRegisters == 32 ? 24 : 12;
  constexpr int V = std::min(kVectors, std::max(1, kMost / (R * K::kSums) >= 4 ? 4 : kMost / (R * K::kSums) >= 2 ? 2 : 1));
  constexpr int quads = group / 4, per_group = kGroup / group;
  const int32_t* x = rows.words_at(row, R, first_group);
  const int32_t* starts = rows.starts_at(row, R, first_group * per_group);
  const float* x_scales = rows.scales_at(row, R, first_group);
  const float* x_sums = rows.sums_at(row, R, first_group * per_group);
  for (int v0 = 0; v0 < kVectors; v0 += V) {
    Floats total[R][V];
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
      KERNEL_UNROLL
      for (int v = 0; v < V; ++v) total[r][v] = load(totals + r * kTile + (v0 + v) * kLanes);
    }
    const Ints* w = panel + v0 * K::kParts;
    const int32_t* words = x;
    for (int64_t g = 0; g < groups; ++g) {
      Ints sums[R][V][K::kSums];
      KERNEL_UNROLL
      for (int r = 0; r < R; ++r) {
        const Ints start = broadcast(starts[g * R + r]);
        KERNEL_UNROLL
        for (int v = 0; v < V; ++v) K::begin(sums[r][v], start);
      }
      for (int q = 0; q < quads; ++q, w += kVectors * K::kParts, words += R * K::kWords) {
        Ints own[V][K::kParts];
        KERNEL_UNROLL
        for (int v = 0; v < V; ++v) {
          KERNEL_UNROLL
          for (int i = 0; i < K::kParts; ++i) own[v][i] = load_ints(w + v * K::kParts + i);
        }
        KERNEL_UNROLL
        for (int r = 0; r < R; ++r) {
          Ints word[K::kWords];
          KERNEL_UNROLL
          for (int i = 0; i < K::kWords; ++i) word[i] = broadcast(words[i * R + r]);
          KERNEL_UNROLL
          for (int v = 0; v < V; ++v) {
            K::add(sums[r][v], own[v], word);
            KERNEL_UNROLL
            for (int i = 0; i < K::kSums; ++i) kernel::settle(sums[r][v][i]);
          }
        }
      }
      KERNEL_UNROLL
      for (int r = 0; r < R; ++r) {
        const Floats x_scale = broadcast(x_scales[g / per_group * R + r]);
        KERNEL_UNROLL
        for (int v = 0; v < V; ++v) {
          const Floats sum = kernel::to_floats(K::total(sums[r][v])) * x_scale;
          total[r][v] = multiply_add(sum, load(scales.scale[g] + (v0 + v) * kLanes), total[r][v]);
        }
      }
      if (shifted) {
        KERNEL_UNROLL
        for (int r = 0; r < R; ++r) {
          const Floats sum = broadcast(x_sums[g * R + r]);
          KERNEL_UNROLL
          for (int v = 0; v < V; ++v) {
            total[r][v] = multiply_add(sum, load(scales.shift[g] + (v0 + v) * kLanes), total[r][v]);
          }
        }
      }
    }
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
      KERNEL_UNROLL
      for (int v = 0; v < V; ++v) store(totals + r * kTile + (v0 + v) * kLanes, total[r][v]);
    }
  }
}

template <bool wide>
struct IntegerProduct {
  using K = Kind<wide>;
  static constexpr int64_t kPanelBytes = int64_t{kStepGroups} * kQuads * kVectors * K::kParts * sizeof(Ints);
  const Problem& p;
  IntegerRows rows;

  explicit IntegerProduct(const Problem& problem) : p(problem) {
    rows.k = p.k, rows.groups = p.k / kGroup, rows.scaled = p.k / p.form.group, rows.words_a_quad = K::kWords;
    const int64_t words = p.rows * p.k / 4 * K::kWords, scaled = p.rows * rows.scaled;
    float* memory = kernel::scratch<0>(words + 2 * scaled + p.rows * rows.groups);
    rows.words = reinterpret_cast<int32_t*>(memory);
    rows.starts = rows.words + words;
    rows.sums = memory + words + scaled;
    rows.scales = rows.sums + scaled;
  }
  void prepare(const float* x, int64_t first, int64_t size, int64_t r) const {
    prepare_row<K>(rows, p.form, x, first, size, r);
  }
  // Compiled once for all types of x.
  __attribute__((noinline)) void step(const uint8_t* tile, int64_t first, int64_t last, void* panel, Scales& scales,
                                      float* totals) const {
    Ints* numbers = static_cast<Ints*>(panel);
    for_step(p.form, tile, first, last, scales, [&](int64_t g, const uint8_t* packed) {
      Ints* to = numbers + g * kQuads * kVectors * K::kParts;
      const auto put = [&](int q, int v, Ints quads) {
        K::put(p.form, quads, to + (q * kVectors + v) * K::kParts);
      };
      if constexpr (wide) {
        unpack_wide(p.form, packed, put);
      } else {
        unpack_narrow(p.form, packed, put);
      }
    });
    const int64_t groups = (last - first) * kGroup / p.form.group;
    if (p.form.mins) {
      // Integers are centred.
      const Floats centre = broadcast(static_cast<float>(p.form.centre()));
      for (int64_t g = 0; g < groups; ++g) {
        for (int c = 0; c < kTile; c += kLanes) {
          store(scales.shift[g] + c, multiply_add(centre, load(scales.scale[g] + c), load(scales.shift[g] + c)));
        }
      }
    }
    kernel::for_row_blocks(p.rows, [&](auto size, int64_t row) {
      float* own = totals + row * kTile;
      if (wide || p.form.group == kGroup) {
        multiply_integers<K, kGroup, size>(numbers, scales, p.form.mins, rows, row, first, groups, own);
      } else {
        multiply_integers<K, wide ? kGroup : 16, size>(numbers, scales, p.form.mins, rows, row, first, groups, own);
      }
    });
  }
};

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
