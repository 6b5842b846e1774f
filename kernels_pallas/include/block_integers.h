// Products of blocks with integers of 8 bits; block_matmul.cc says how.
#ifndef KERNELS_PALLAS_BLOCK_INTEGERS_H_
#define KERNELS_PALLAS_BLOCK_INTEGERS_H_

#include <algorithm>
#include <cstdint>

#include "block_forms.h"

namespace {

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

}  // namespace

#endif  // KERNELS_PALLAS_BLOCK_INTEGERS_H_
