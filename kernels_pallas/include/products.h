// x @ w for w [stored rows, N] with N contiguous, of any kind of number: what dense_matmul and quant_matmul share.
//
// Memory delivers a matrix at its full rate only when it is read as it lies, whole rows one after the other. So K is
// cut into parts, which threads take, and each thread goes through its part in tiles of a few whole rows (of a piece
// of kPieceBytes where rows are long). While a tile is multiplied, the next one is asked for in the order of memory.
// A strip of kStrip columns of a tile is laid out for the arithmetic once, in a panel that stays in the first-level
// cache, and is multiplied by all rows of x, a few at a time.
//
// A panel is a row of terms: 32 bits for each of kStrip columns, which meet one word of 32 bits of each row of x. A
// Kind says how many rows of w a term holds, how they are laid out, and which instruction multiplies them:
//
//   Floats         one row, a fused multiply-add
//   Pairs          two rows, bfloat16 or integers of 16 bits
//   Quads          four rows of bytes
//
// Every number of the result is one chain of sums over the rows of w in each part, and a fixed tree of sums over the
// parts, whose number the shape of w decides alone. So a row's result depends neither on the other rows nor on which
// thread computes what.

#ifndef KERNELS_PALLAS_PRODUCTS_H_
#define KERNELS_PALLAS_PRODUCTS_H_

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

// ---- the product ----

template <class Kind>
class Multiplication {
 public:
  explicit Multiplication(const Product& product) : p(product), grouped(p.scales != nullptr && p.groups > 1) {
    const int64_t bytes = p.stored * p.columns * p.column_bytes, run = p.stored / p.groups;
    parts = 1;
    if (p.columns * p.column_bytes <= kRowBytes) {
      const int64_t most = std::min(kParts, p.groups > 1 ? p.groups : ceil_div(p.stored, kPartUnit));
      while (2 * parts <= most && bytes >= 2 * parts * kPartBytes) parts *= 2;
    }
    for (int64_t part = 0; part < parts; ++part) {
      first_span.push_back(spans.size());
      if (p.groups > 1) {
        for (int64_t g = part * p.groups / parts; g < (part + 1) * p.groups / parts; ++g) add_span(g * run, run, g);
      } else {
        const int64_t units = ceil_div(p.stored, kPartUnit);
        const int64_t from = part * units / parts * kPartUnit;
        const int64_t to = std::min((part + 1) * units / parts * kPartUnit, p.stored);
        add_span(from, to - from, 0);
      }
    }
    first_span.push_back(spans.size());
  }

  // Lays x out for the terms. prepare_row(row, span, words, apart, starts) writes those of a span, each `apart` behind
  // the last.
  template <typename Prepare>
  void prepare(const Prepare& prepare_row) {
    x = reinterpret_cast<int32_t*>(scratch<0>(p.rows * (words + start_words)));
    starts = start_words == 0 ? nullptr : x + p.rows * words;
    for_row_blocks(p.rows, [&](auto size, int64_t first) {
      for (int r = 0; r < size; ++r) {
        for (const Span& span : spans) {
          int32_t* own = x + first * words + span.x * size + r;
          const int64_t row = first + r;
          prepare_row(row, span, own, size, starts == nullptr ? nullptr : starts + row * start_words + span.start);
        }
      }
    });
  }

  template <typename Pool>
  void run(Pool& pool) {
    if (p.rows == 0 || p.columns == 0) return;
    const int64_t bytes = p.stored * p.columns * p.column_bytes;
    const int64_t worth = std::max<int64_t>(1, bytes * ceil_div(p.rows, kMostRows) / kBytesPerThread);
    const int64_t threads = std::min(worth, std::max<int64_t>(1, pool.num_threads()));
    const int64_t most = std::min(kSumsBytes / (4 * p.rows), kPieceBytes / p.column_bytes);
    int64_t pieces = ceil_div(p.columns, std::max<int64_t>(most / kStrip * kStrip, kStrip));
    int64_t ranges = 1;
    if (threads > 1) {
      while (ranges < parts && pieces * ranges < 2 * threads) ranges *= 2;
      pieces = std::max(pieces, std::min(ceil_div(2 * threads, ranges), ceil_div(p.columns, kStrip)));
    }
    const int64_t strips = ceil_div(p.columns, kStrip);
    pieces = std::min(pieces, strips);
    padded = strips * kStrip;
    results = scratch<1>(ranges * p.rows * padded);
    const auto chunk_at = [&](int64_t index) {
      const int64_t piece = index / ranges, range = index % ranges;
      return Chunk{piece * strips / pieces * kStrip, (piece + 1) * strips / pieces * kStrip,
                   range * parts / ranges, (range + 1) * parts / ranges, range};
    };
    const int64_t chunks = pieces * ranges;
    parallel_for(pool, threads, chunks, [&](int64_t index, int64_t next) {
      const Chunk chunk = chunk_at(index);
      const Chunk after = chunk_at(next);
      Work work(*this, chunk, next < chunks ? p.at(spans[first_span[after.first_part]].first, after.first) : nullptr);
      work.parts(chunk.first_part, chunk.last_part, results + chunk.range * p.rows * padded + chunk.first, padded);
      if (ranges == 1) finish(0, p.rows, chunk.first, chunk.last, 1);
    });
    if (ranges == 1) return;
    const int64_t work = p.rows * padded * ranges * 4 / kBytesPerThread;
    const int64_t shares = std::clamp<int64_t>(work, 1, std::min(threads, strips));
    parallel_for(pool, shares, shares, [&](int64_t share, int64_t) {
      finish(0, p.rows, share * strips / shares * kStrip, (share + 1) * strips / shares * kStrip, ranges);
    });
  }

 private:
  using Number = typename Kind::Number;
  static constexpr int64_t kPartUnit = 32;  // rows of w, of which parts have whole numbers

  struct Chunk {
    int64_t first, last;  // columns, whole strips
    int64_t first_part, last_part, range;
  };

  // Rows of w of the shortest tile.
  static int64_t shortest_tile() {
    const int64_t rows = ceil_div(kLeastTerms, Kind::kTerms) * Kind::kStep;
    return ceil_div(rows, Kind::kTileUnit) * Kind::kTileUnit;
  }

  void add_span(int64_t first, int64_t count, int64_t group) {
    const int64_t terms = ceil_div(count, Kind::kStep) * Kind::kTerms;
    spans.push_back({first, count, group, words, start_words});
    words += terms;
    start_words += Kind::starts(terms);
  }

  // What a thread needs for a chunk.
  struct Work {
    const Multiplication& m;
    const Product& p;
    Chunk chunk;
    const char* following;  // where the thread goes on behind the chunk, or null
    int64_t width, tile, end;
    Number* sums;
    float* scales;
    int32_t* panel;
    float* more;  // results of parts that are to be added to others
    int64_t lines_left;
    const char *line, *row_line;

    Work(const Multiplication& m, const Chunk& chunk, const char* following)
        : m(m), p(m.p), chunk(chunk), following(following), width(chunk.last - chunk.first) {
      const int64_t fits = (p.rows <= kFewRows ? kFewRowsTileBytes : kTileBytes) / (width * p.column_bytes) / Kind::kTileUnit * Kind::kTileUnit;
      tile = std::clamp(fits, shortest_tile(), kMostTile);
      const int64_t panel_size = ceil_div(tile, Kind::kStep) * Kind::kTerms * kStrip;
      const int64_t size = p.rows * width;
      int64_t depth = 0;
      while ((int64_t{1} << depth) < chunk.last_part - chunk.first_part) ++depth;
      float* memory = scratch<2>(panel_size + kStrip + (m.grouped ? size : 0) + depth * size);
      panel = reinterpret_cast<int32_t*>(memory);
      scales = memory + panel_size;
      sums = reinterpret_cast<Number*>(scales + kStrip);
      more = scales + kStrip + (m.grouped ? size : 0);
      const Span& last = m.spans[m.first_span[chunk.last_part] - 1];
      end = last.first + last.count;
    }

    // The sums of parts [first, last) to result [rows, stride].
    void parts(int64_t first, int64_t last, float* result, int64_t stride) {
      if (last - first == 1) return part(first, result, stride);
      const int64_t middle = (first + last) / 2, size = p.rows * width;
      parts(first, middle, result, stride);
      float* other = more;
      more += size;
      parts(middle, last, other, width);
      more = other;
      for (int64_t r = 0; r < p.rows; ++r) m.add_row(result + r * stride, other + r * width, width);
    }

    void part(int64_t index, float* result, int64_t stride) {
      if (m.grouped || p.stored == 0) {
        for (int64_t r = 0; r < p.rows; ++r) std::fill_n(result + r * stride, width, 0.0f);
      }
      for (int64_t s = m.first_span[index]; s < m.first_span[index + 1]; ++s) {
        const Span& span = m.spans[s];
        for (int64_t row = 0; row < span.count; row += tile) {
          multiply_tile(span, row, std::min(row + tile, span.count), result, stride);
        }
      }
    }

    void multiply_tile(const Span& span, int64_t from, int64_t to, float* result, int64_t stride) {
      const int64_t after = span.first + to;
      row_line = line = after < end ? p.at(after, chunk.first) : following;
      lines_left = width * p.column_bytes / 64;
      const int64_t term = from / Kind::kStep * Kind::kTerms;
      Panel strip;
      strip.terms = ceil_div(to - from, Kind::kStep) * Kind::kTerms;
      strip.numbers = panel;
      strip.x = m.x;
      strip.words = m.words;
      strip.first = span.x + term;
      strip.starts = m.starts == nullptr ? nullptr : m.starts + span.start + Kind::start_of(term);
      strip.start_stride = m.start_words;
      strip.fresh = from == 0;
      const bool ends = m.grouped && to == span.count;
      strip.scales = ends ? scales : nullptr;
      Number* own = m.grouped ? sums : reinterpret_cast<Number*>(result);
      const int64_t own_stride = m.grouped ? width : stride;
      for (int64_t column = chunk.first; column < chunk.last; column += kStrip) {
        if (line != nullptr) ask((to - from) * p.column_bytes);
        if (p.rows > kFewRows && column + kStrip < chunk.last) ask_strip(span.first + from, to - from, column + kStrip);
        lay_out(span.first + from, to - from, column);
        if (ends) m.load_scales(span.group, column, scales);
        const int64_t at = column - chunk.first;
        for_row_blocks(p.rows, [&](auto size, int64_t row) {
          multiply_rows<Kind, size>(strip, row, own + at, own_stride, result + at, stride);
        });
      }
    }

    // Asks for the next lines of what is multiplied after this tile, in the order of memory.
    void ask(int64_t lines) {
      for (int64_t i = 0; i < lines; ++i) {
        prefetch(line);
        line += 64;
        if (--lines_left == 0) {
          line = row_line += p.columns * p.column_bytes;
          lines_left = width * p.column_bytes / 64;
        }
      }
    }

    // Brings a strip of this tile nearer.
    void ask_strip(int64_t first, int64_t count, int64_t column) const {
      const char* row = p.at(first, column);
      for (int64_t i = 0; i < count; ++i, row += p.columns * p.column_bytes) {
        for (int64_t at = 0; at < kStrip * p.column_bytes; at += 64) prefetch(row + at);
      }
    }

    // Columns that are not there, and rows that a last step lacks, are zeros.
    void lay_out(int64_t first, int64_t count, int64_t column) {
      static const char zeros[kStrip * 4] = {};
      const int64_t there = std::min<int64_t>(kStrip, p.columns - column);
      char copies[Kind::kStep][kStrip * 4];
      int32_t* to = panel;
      for (int64_t row = 0; row < count; row += Kind::kStep, to += Kind::kTerms * kStrip) {
        const char* rows[Kind::kStep];
        KERNEL_UNROLL
        for (int i = 0; i < Kind::kStep; ++i) {
          rows[i] = row + i < count ? p.at(first + row + i, column) : zeros;
          if (there < kStrip) {
            std::memset(copies[i], 0, sizeof copies[i]);
            std::memcpy(copies[i], rows[i], there * p.column_bytes);
            rows[i] = copies[i];
          }
        }
        Kind::lay_out(rows, to);
      }
    }
  };

  void add_row(float* to, const float* from, int64_t count) const {
    if (grouped || std::is_same_v<Number, float>) {
      for (int64_t i = 0; i < count; ++i) to[i] += from[i];
    } else {
      int32_t* sums = reinterpret_cast<int32_t*>(to);
      const int32_t* others = reinterpret_cast<const int32_t*>(from);
      for (int64_t i = 0; i < count; ++i) sums[i] += others[i];
    }
  }

  // Scales of kStrip columns in the order of the sums.
  void load_scales(int64_t group, int64_t column, float* to) const {
    const int64_t there = std::min<int64_t>(kStrip, p.columns - column);
    float values[kStrip] = {};
    std::memcpy(values, p.scales + group * p.columns + column, there * sizeof(float));
    for (int64_t c = 0; c < kStrip; c += 4 * kLanes) {
      Floats four[4];
      for (int v = 0; v < 4; ++v) four[v] = load(values + c + v * kLanes);
      if (Kind::kInterleaved) lanes_interleaved(four);
      for (int v = 0; v < 4; ++v) store(to + c + v * kLanes, four[v]);
    }
  }

  // Rows and columns of the result, from the sums of `ranges` ranges of parts.
  void finish(int64_t first_row, int64_t last_row, int64_t first, int64_t last, int64_t ranges) const {
    const int64_t size = p.rows * padded;
    for (int64_t r = first_row; r < last_row; ++r) {
      float* own = results + r * padded + first;
      // A tree: ranges are a power of two.
      for (int64_t apart = 1; apart < ranges; apart *= 2) {
        for (int64_t i = 0; i + apart < ranges; i += 2 * apart) add_row(own + i * size, own + (i + apart) * size, last - first);
      }
      const Floats x_scale = broadcast(p.x_scales == nullptr ? 1.0f : p.x_scales[r]);
      for (int64_t column = first; column < last; column += kStrip) {
        float scale[kStrip], values[kStrip];
        const bool scaled = p.scales != nullptr && !grouped;
        if (scaled) load_scales(0, column, scale);
        for (int64_t c = 0; c < kStrip; c += 4 * kLanes) {
          Floats four[4];
          for (int v = 0; v < 4; ++v) {
            const float* at = own + column - first + c + v * kLanes;
            four[v] = grouped ? load(at) : Kind::floats(load_as<typename Kind::Sum>(at));
            if (scaled) four[v] *= load(scale + c + v * kLanes);
            if (p.x_scales != nullptr) four[v] *= x_scale;
          }
          if (Kind::kInterleaved) lanes_in_order(four);
          for (int v = 0; v < 4; ++v) store(values + c + v * kLanes, four[v]);
        }
        store_numbers(r * p.columns + column, values, std::min<int64_t>(kStrip, p.columns - column));
      }
    }
  }

  void store_numbers(int64_t at, const float* values, int64_t count) const {
    if (!p.out_bfloat16) {
      std::memcpy(static_cast<float*>(p.out) + at, values, count * sizeof(float));
      return;
    }
    uint16_t rounded[kStrip];
    for (int c = 0; c < kStrip; ++c) rounded[c] = to_bfloat16(values[c]);
    std::memcpy(static_cast<uint16_t*>(p.out) + at, rounded, count * sizeof(uint16_t));
  }

  const Product p;
  const bool grouped;  // scales meet sums within the product, not at its end
  int64_t parts, words = 0, start_words = 0, padded = 0;
  std::vector<Span> spans;
  std::vector<int64_t> first_span;  // of each part, and behind the last
  int32_t *x = nullptr, *starts = nullptr;
  float* results = nullptr;  // [ranges, rows, padded]
};

}  // namespace kernel

#endif  // KERNELS_PALLAS_PRODUCTS_H_
