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
#include <vector>

#include "product_kinds.h"
#include "xla/ffi/api/ffi.h"

namespace kernel {

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
