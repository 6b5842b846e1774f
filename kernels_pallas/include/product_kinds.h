// What products.h is made of: its sizes, the kinds of numbers that are multiplied, and the panels they lie in.
#ifndef KERNELS_PALLAS_PRODUCT_KINDS_H_
#define KERNELS_PALLAS_PRODUCT_KINDS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernel.h"
#include "level.h"
#include "xla/ffi/api/ffi.h"

namespace kernel {

constexpr int kStrip = 64;                      // columns
constexpr int kStripVectors = kStrip / kLanes;  // registers of a term
constexpr int kMostRows = 6;                    // of x in a block
constexpr int64_t kPieceBytes = 20 << 10;       // of a row of w
constexpr int64_t kLeastTerms = 8;              // of a tile, at whose ends sums are loaded and stored
constexpr int64_t kTileBytes = 32 << 10;        // of w, beyond those terms
constexpr int64_t kFewRows = 2;                 // of x, for which
constexpr int64_t kFewRowsTileBytes = 16 << 10;  // a tile is no more than a first-level cache holds beside the rest
constexpr int64_t kMostTile = 512;              // rows of w
constexpr int64_t kSumsBytes = 160 << 10;       // of a piece's sums
constexpr int64_t kRowBytes = 32 << 10;         // longer rows of w are cut into pieces alone and K is whole
constexpr int64_t kParts = 4;
constexpr int64_t kPartBytes = 64 << 10;        // of w, at least
constexpr int64_t kBytesPerThread = 128 << 10;  // of w; a thread that reads less costs more to wake than it saves

struct Product {
  int64_t rows, k, stored, columns, groups;
  const char* w;  // [stored, columns], of K / stored numbers each
  int64_t column_bytes;
  const float* scales;    // [groups, columns], or null
  const float* x_scales;  // [rows], or null
  void* out;              // [rows, columns]
  bool out_bfloat16;

  int64_t packed_rows() const { return stored == k ? 1 : 2; }
  const char* at(int64_t row, int64_t column) const { return w + (row * columns + column) * column_bytes; }
};

// Registers of columns that a block of R rows takes at once: as many as hold its sums.
template <int R>
constexpr int vectors_of() {
  constexpr int most = (kRegisters == 32 ? 24 : 12) / R;
  int vectors = 1;
  while (2 * vectors <= most && 2 * vectors <= kStripVectors) vectors *= 2;
  return vectors;
}

// Calls body(size of the block, its first row) for blocks of at most kMostRows rows of nearly equal size; the size is
// a constant.
template <typename Body>
void for_row_blocks(int64_t rows, const Body& body) {
  const int64_t blocks = ceil_div(rows, kMostRows);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t row = b * rows / blocks;
    switch ((b + 1) * rows / blocks - row) {
      case 1: body(std::integral_constant<int, 1>{}, row); break;
      case 2: body(std::integral_constant<int, 2>{}, row); break;
      case 3: body(std::integral_constant<int, 3>{}, row); break;
      case 4: body(std::integral_constant<int, 4>{}, row); break;
      case 5: body(std::integral_constant<int, 5>{}, row); break;
      case 6: body(std::integral_constant<int, 6>{}, row); break;
    }
  }
}

// Scratch memory of a thread, kept from call to call.
template <int use>
float* scratch(int64_t numbers) {
  thread_local std::vector<float> kept;
  if (static_cast<int64_t>(kept.size()) < numbers) kept.resize(numbers);
  return kept.data();
}

// Rows of w that have their sums in common: those of a group that lie in one part.
struct Span {
  int64_t first, count, group;
  int64_t x;      // the word of a row of x that the first term meets
  int64_t start;  // the first of a row's starts
};

// ---- kinds ----
//
// kStep rows of w become kTerms terms (lay_out). A sum begins with first(starts) and goes on with accumulate; starts(n)
// words of a row of x belong to n terms of a span, from start_of(t) on to the terms from t on.

// What kinds of float32 sums share.
struct FloatSums {
  using Sum = Floats;
  using Number = float;
  static constexpr bool kInterleaved = false;
  static constexpr int64_t kTileUnit = 4;
  static constexpr int64_t starts(int64_t) { return 0; }
  static constexpr int64_t start_of(int64_t) { return 0; }
  static Sum first(const int32_t*) { return broadcast(0.0f); }
  static Floats floats(Sum sum) { return sum; }
};

// Sums of products, a term at a time, with x [terms, R].
template <class Kind, int R, int V>
inline void add_terms(typename Kind::Sum (&sums)[R][V], const int32_t* numbers, int64_t terms, const int32_t* x) {
  for (int64_t t = 0; t < terms; ++t, numbers += kStrip, x += R) {
    Ints own[V];
    KERNEL_UNROLL
    for (int v = 0; v < V; ++v) own[v] = load_ints(numbers + v * kLanes);
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
      const Ints word = broadcast(x[r]);
      KERNEL_UNROLL
      for (int v = 0; v < V; ++v) sums[r][v] = Kind::multiply(own[v], word, sums[r][v]);
    }
  }
}

// One row of w, or two that are stored in one, widened to float32 by Reader.
template <class Reader>
struct FloatTerms : FloatSums {
  static constexpr int kStep = 1, kTerms = Reader::kTerms, kWordNumbers = 1;
  static Floats multiply(Ints number, Ints word, Floats sum) { return multiply_add((Floats)number, (Floats)word, sum); }
  static void lay_out(const char* const (&rows)[1], int32_t* to) { Reader::widen_row(rows[0], to); }
  template <int R, int V>
  static void accumulate(Floats (&sums)[R][V], const int32_t* numbers, int64_t terms, const int32_t* x,
                         const int32_t*, int64_t) {
    add_terms<FloatTerms, R, V>(sums, numbers, terms, x);
  }
};

// Words of one number, widened to float32, or of a pair of bfloat16, the last with a zero where it has no partner;
// `apart` words from one to the next.
template <int word_numbers>
inline void to_words(const float* from, int64_t count, int32_t* to, int64_t apart) {
  static_assert(word_numbers == 1);
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * apart, from + i, sizeof(float));
}
template <int word_numbers>
inline void to_words(const uint16_t* from, int64_t count, int32_t* to, int64_t apart) {
  if (word_numbers == 1) {
    for (int64_t i = 0; i < count; ++i) to[i * apart] = static_cast<int32_t>(static_cast<uint32_t>(from[i]) << 16);
  } else {
    for (int64_t i = 0; i < count / 2; ++i) std::memcpy(to + i * apart, from + 2 * i, sizeof(int32_t));
    if (count % 2) to[count / 2 * apart] = from[count - 1];
  }
}

// A strip of a tile as the arithmetic reads it, and what becomes of its sums.
struct Panel {
  int64_t terms;
  const int32_t* numbers;  // [terms, kStrip]
  const int32_t* x;        // the words of x; those of a block of R rows are [terms, R]
  int64_t words, first;    // of a row of x, and the one that the first term meets
  const int32_t* starts;  // the first row's, or null
  int64_t start_stride;
  bool fresh;           // sums begin here
  const float* scales;  // in the order of the sums: they end here, and are added to totals; or null
};

// Adds what R rows of x make of a panel to sums [rows, width], or at their end to totals [rows, stride].
template <class Kind, int R>
inline void multiply_rows(const Panel& panel, int64_t row, typename Kind::Number* sums, int64_t width, float* totals,
                          int64_t stride) {
  constexpr int V = vectors_of<R>();
  const int32_t* x = panel.x + row * panel.words + panel.first * R;
  const int32_t* starts = panel.starts == nullptr ? nullptr : panel.starts + row * panel.start_stride;
  sums += row * width, totals += row * stride;
  for (int64_t c = 0; c < kStrip; c += V * kLanes) {
    typename Kind::Sum block[R][V];
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
      KERNEL_UNROLL
      for (int v = 0; v < V; ++v) {
        block[r][v] = panel.fresh ? Kind::first(starts == nullptr ? nullptr : starts + r * panel.start_stride)
                                  : load_as<typename Kind::Sum>(sums + r * width + c + v * kLanes);
      }
    }
    Kind::template accumulate<R, V>(block, panel.numbers + c, panel.terms, x, starts, panel.start_stride);
    KERNEL_UNROLL
    for (int r = 0; r < R; ++r) {
      KERNEL_UNROLL
      for (int v = 0; v < V; ++v) {
        const int64_t at = c + v * kLanes;
        if (panel.scales == nullptr) {
          store(sums + r * width + at, block[r][v]);
        } else {
          float* total = totals + r * stride + at;
          store(total, multiply_add(Kind::floats(block[r][v]), load(panel.scales + at), load(total)));
        }
      }
    }
  }
}

}  // namespace kernel

#endif  // KERNELS_PALLAS_PRODUCT_KINDS_H_
