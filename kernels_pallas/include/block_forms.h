// Blocks of 2 to 8 bits with scales of their own, as block_matmul's forms.py lays them, and how they are unpacked.
#ifndef KERNELS_PALLAS_BLOCK_FORMS_H_
#define KERNELS_PALLAS_BLOCK_FORMS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "products.h"

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

}  // namespace

#endif  // KERNELS_PALLAS_BLOCK_FORMS_H_
