// Attention of new tokens over a cache on a CPU, called by XLA through its foreign function interface.
//
// A task takes up to kRows queries of one key/value head: all their scores, then the softmax, then the sum of the
// values. It reads no slot behind the last written one, nor those that have left the window of all its queries. Every
// number of the result is one chain of sums, over channels for a score and over slots for an output, and a slot that
// is not seen adds exactly nothing. So a query's result depends on what it sees and not on how many other queries, or
// unseen slots, stand in the call.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "exponential.h"
#include "kernel.h"
#include "level.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using kernel::ceil_div;
using kernel::exponential;
using kernel::Floats;
using kernel::kLanes;

namespace {

constexpr int64_t kRows = 32;       // queries of a task, whose scores lie in a second-level cache
constexpr int kScoreRows = 8;       // queries that share a load of keys
constexpr int kOutRows = 4;         // queries that share a load of values
constexpr int kOutVectors = kernel::kRegisters == 32 ? 4 : 2;  // registers of a value that they share
constexpr int64_t kWorkPerThread = 1 << 17;  // multiply-adds below which a thread costs more than it saves

using Lengths = ffi::Buffer<ffi::S32, 1>;
using Places = ffi::Buffer<ffi::S32, 2>;
using Visibility = ffi::Buffer<ffi::PRED, 3>;

struct Problem {
  int64_t batch, nodes, heads, dim, kv_heads, capacity, fresh;
  const void* q;
  bool q_bfloat16;
  const void *k, *v;
  const float *k_scale, *v_scale;  // [batch, kv_heads, capacity], or null
  const int32_t *lengths, *positions, *slot_positions;
  const bool* visible;  // [batch, nodes, fresh]
  void* out;
  bool out_bfloat16;
  float scale, softcap;
  int64_t window;
};

// cap * tanh(x / cap). Out of line, as most models have no caps.
__attribute__((noinline)) Floats capped(Floats x, float cap) {
  const Floats size = kernel::magnitude(x / kernel::broadcast(cap)), one = kernel::broadcast(1.f);
  const Floats e = exponential(size * kernel::broadcast(-2.f));
  const Floats value = (one - e) / (one + e) * kernel::broadcast(cap);
  return x < kernel::broadcast(0.f) ? -value : value;
}

// Calls body(count, its first row) for blocks of at most `most` rows; the count is a constant.
template <int most, typename Body>
void for_blocks(int64_t rows, const Body& body) {
  int64_t row = 0;
  for (; row + most <= rows; row += most) body(std::integral_constant<int, most>{}, row);
  if constexpr (most > 1) {
    const auto rest = [&](auto size) {
      if (rows - row == size) body(size, row);
    };
    rest(std::integral_constant<int, 1>{});
    if constexpr (most > 2) rest(std::integral_constant<int, 2>{});
    if constexpr (most > 3) rest(std::integral_constant<int, 3>{});
    if constexpr (most > 4) {
      rest(std::integral_constant<int, 4>{});
      rest(std::integral_constant<int, 5>{});
      rest(std::integral_constant<int, 6>{});
      rest(std::integral_constant<int, 7>{});
    }
  }
}

template <typename T>
struct Task {
  const Problem& p;
  int64_t row, kv_head, first, count;  // first query of `nodes x group`, and how many
  int64_t group, length, begin, slots, stride;  // slots begin, a multiple of kLanes, to slots are read
  const T *keys, *values;
  float *queries, *scores, *keys_turned;

  Task(const Problem& p, int64_t index, int64_t blocks) : p(p) {
    row = index / (p.kv_heads * blocks);
    kv_head = index / blocks % p.kv_heads;
    group = p.heads / p.kv_heads;
    first = index % blocks * kRows;
    count = std::min(kRows, p.nodes * group - first);
    // A length that leaves no room for the new slots is cut, as dynamic_update_slice does.
    length = std::clamp<int64_t>(p.lengths[row], 0, p.capacity - p.fresh);
    slots = length + p.fresh;
    int64_t earliest = length;
    for (int64_t n = node(0); n <= node(count - 1); ++n) earliest = std::min(earliest, oldest(n));
    begin = std::max<int64_t>(0, earliest) / kLanes * kLanes;
    stride = ceil_div(slots, kLanes) * kLanes;
    const int64_t at = (row * p.kv_heads + kv_head) * p.capacity * p.dim;
    keys = static_cast<const T*>(p.k) + at;
    values = static_cast<const T*>(p.v) + at;
    thread_local std::vector<float> scratch;
    scratch.resize(kRows * (p.dim + stride) + p.dim * kLanes);
    queries = scratch.data();
    scores = queries + kRows * p.dim;
    keys_turned = scores + kRows * stride;
  }

  int64_t node(int64_t i) const { return (first + i) / group; }
  int64_t oldest(int64_t n) const {  // position that node n still sees
    return p.window > 0 ? p.positions[row * p.nodes + n] - p.window + 1 : INT32_MIN;
  }
  int64_t number(int64_t i) const {  // of query i's first channel in q and out
    return ((row * p.nodes + node(i)) * p.heads + kv_head * group + (first + i) % group) * p.dim;
  }

  void run() {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t d = 0; d < p.dim; ++d) {
        queries[i * p.dim + d] = p.q_bfloat16 ? kernel::from_bfloat16(static_cast<const uint16_t*>(p.q)[number(i) + d])
                                              : static_cast<const float*>(p.q)[number(i) + d];
      }
    }
    score();
    float totals[kRows] = {};
    for (int64_t i = 0; i < count; ++i) weigh(i);
    for_blocks<kScoreRows>(count, [&](auto size, int64_t i) {
      for (int64_t s = begin; s < slots; ++s) {
        for (int r = 0; r < size; ++r) totals[i + r] += scores[(i + r) * stride + s];
      }
    });
    if (p.v_scale != nullptr) {
      const float* scale = p.v_scale + (row * p.kv_heads + kv_head) * p.capacity;
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t s = begin; s < slots; ++s) scores[i * stride + s] *= scale[s];
      }
    }
    for (int64_t d = 0; d < p.dim; d += kOutVectors * kLanes) {
      const int64_t left = (p.dim - d) / kLanes;
      for_blocks<kOutRows>(count, [&](auto size, int64_t i) {
        switch (left) {
          case 1: sum<size, 1>(i, d, totals); break;
          case 2: sum<size, std::min(2, kOutVectors)>(i, d, totals); break;
          case 3: sum<size, std::min(3, kOutVectors)>(i, d, totals); break;
          default: sum<size, kOutVectors>(i, d, totals);
        }
      });
    }
  }

  void score() {
    const float* scales = p.k_scale == nullptr ? nullptr : p.k_scale + (row * p.kv_heads + kv_head) * p.capacity;
    for (int64_t s = begin; s < slots; s += kLanes) {
      const int64_t here = std::min<int64_t>(kLanes, slots - s);
      for (int64_t d = 0; d < p.dim; d += kLanes) {
        Floats block[kLanes];
        for (int j = 0; j < kLanes; ++j) {
          block[j] = j < here ? kernel::widen(keys + (s + j) * p.dim + d) : kernel::broadcast(0.f);
        }
        kernel::transpose(block);
        for (int j = 0; j < kLanes; ++j) kernel::store(keys_turned + (d + j) * kLanes, block[j]);
      }
      Floats factor = kernel::broadcast(p.scale);
      if (scales != nullptr) {
        float own[kLanes] = {};
        std::memcpy(own, scales + s, here * sizeof(float));
        factor *= kernel::load(own);
      }
      for_blocks<kScoreRows>(count, [&](auto size, int64_t i) {
        Floats sums[size];
        KERNEL_UNROLL
        for (int r = 0; r < size; ++r) sums[r] = kernel::broadcast(0.f);
        const float* q = queries + i * p.dim;
        for (int64_t d = 0; d < p.dim; ++d) {
          const Floats key = kernel::load(keys_turned + d * kLanes);
          KERNEL_UNROLL
          for (int r = 0; r < size; ++r) {
            sums[r] = kernel::multiply_add(kernel::broadcast(q[r * p.dim + d]), key, sums[r]);
          }
        }
        KERNEL_UNROLL
        for (int r = 0; r < size; ++r) {
          const Floats value = sums[r] * factor;
          kernel::store(scores + (i + r) * stride + s, p.softcap > 0 ? capped(value, p.softcap) : value);
        }
      });
    }
  }

  // Which of the kLanes slots from s on query i sees, a bit each.
  uint32_t seen(int64_t i, int64_t s) const {
    const int64_t n = node(i), from = oldest(n);
    constexpr uint32_t all = (1u << kLanes) - 1;
    if (s + kLanes <= length) return all & (all << std::clamp<int64_t>(from - s, 0, kLanes));
    const bool* visible = p.visible + (row * p.nodes + n) * p.fresh;
    const int32_t* at = p.slot_positions + row * p.fresh;
    uint32_t mask = 0;
    for (int64_t j = 0; j < kLanes && s + j < slots; ++j) {
      const int64_t fresh = s + j - length;
      const bool sees = fresh < 0 ? s + j >= from : visible[fresh] && at[fresh] >= from;
      mask |= static_cast<uint32_t>(sees) << j;
    }
    return mask;
  }

  // Scores of query i to weights, the largest of them 1; zeros where it does not see.
  void weigh(int64_t i) {
    float* own = scores + i * stride;
    Floats top = kernel::broadcast(-INFINITY);
    for (int64_t s = begin; s < stride; s += kLanes) {
      top = kernel::choose(seen(i, s), kernel::larger(top, kernel::load(own + s)), top);
    }
    const Floats most = kernel::broadcast(kernel::largest(top));
    for (int64_t s = begin; s < stride; s += kLanes) {
      const Floats weight = exponential(kernel::load(own + s) - most);
      kernel::store(own + s, kernel::choose(seen(i, s), weight, kernel::broadcast(0.f)));
    }
  }

  // Channels d .. of the outputs of queries i ..
  template <int rows, int vectors>
  void sum(int64_t i, int64_t d, const float* totals) {
    Floats sums[rows][vectors];
    KERNEL_UNROLL
    for (int r = 0; r < rows; ++r) {
      KERNEL_UNROLL
      for (int j = 0; j < vectors; ++j) sums[r][j] = kernel::broadcast(0.f);
    }
    const float* weights = scores + i * stride;
    for (int64_t s = begin; s < slots; ++s) {
      const T* value = values + s * p.dim + d;
      Floats loaded[vectors];
      KERNEL_UNROLL
      for (int j = 0; j < vectors; ++j) loaded[j] = kernel::widen(value + j * kLanes);
      KERNEL_UNROLL
      for (int r = 0; r < rows; ++r) {
        const Floats weight = kernel::broadcast(weights[r * stride + s]);
        KERNEL_UNROLL
        for (int j = 0; j < vectors; ++j) sums[r][j] = kernel::multiply_add(weight, loaded[j], sums[r][j]);
      }
    }
    KERNEL_UNROLL
    for (int r = 0; r < rows; ++r) {
      const Floats total = kernel::broadcast(std::max(totals[i + r], 1e-30f));
      float result[vectors * kLanes];
      KERNEL_UNROLL
      for (int j = 0; j < vectors; ++j) kernel::store(result + j * kLanes, sums[r][j] / total);
      const int64_t at = number(i + r) + d;
      for (int c = 0; c < vectors * kLanes; ++c) {
        if (p.out_bfloat16) {
          static_cast<uint16_t*>(p.out)[at + c] = kernel::to_bfloat16(result[c]);
        } else {
          static_cast<float*>(p.out)[at + c] = result[c];
        }
      }
    }
  }
};

template <typename T>
void attend(ffi::ThreadPool& pool, const Problem& p) {
  const int64_t queries = p.nodes * (p.heads / p.kv_heads), blocks = ceil_div(queries, kRows);
  const int64_t tasks = p.batch * p.kv_heads * blocks;
  int64_t used = 0;
  for (int64_t b = 0; b < p.batch; ++b) used += std::max<int64_t>(0, p.lengths[b] + p.fresh);
  const int64_t worth = std::max<int64_t>(1, used * p.kv_heads * queries * p.dim / kWorkPerThread);
  const int64_t threads = std::min({worth, tasks, std::max<int64_t>(1, pool.num_threads())});
  kernel::parallel_for(pool, threads, tasks, [&](int64_t index, int64_t) { Task<T>(p, index, blocks).run(); });
}

const float* optional(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data<float>();
}

ffi::Error cache_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                          Lengths lengths, Visibility visible, Places positions, Places slot_positions,
                          ffi::AnyBuffer k_scale, ffi::AnyBuffer v_scale, float scale, float softcap, int64_t window,
                          ffi::Result<ffi::AnyBuffer> out) {
  const auto asked = q.dimensions(), cached = k.dimensions();
  Problem p;
  p.batch = asked[0], p.nodes = asked[1], p.heads = asked[2], p.dim = asked[3];
  p.kv_heads = cached[1], p.capacity = cached[2], p.fresh = visible.dimensions()[2];
  p.q = q.untyped_data(), p.k = k.untyped_data(), p.v = v.untyped_data(), p.out = out->untyped_data();
  p.q_bfloat16 = q.element_type() == ffi::BF16, p.out_bfloat16 = out->element_type() == ffi::BF16;
  p.k_scale = optional(k_scale), p.v_scale = optional(v_scale);
  p.lengths = lengths.typed_data(), p.visible = visible.typed_data();
  p.positions = positions.typed_data(), p.slot_positions = slot_positions.typed_data();
  p.scale = scale, p.softcap = softcap, p.window = window;
  if (p.fresh > p.capacity) return ffi::Error::InvalidArgument("cache_attention: more new slots than slots");
  switch (k.element_type()) {
    case ffi::F32: attend<float>(pool, p); break;
    case ffi::BF16: attend<uint16_t>(pool, p); break;
    case ffi::S8: attend<int8_t>(pool, p); break;
    default: return ffi::Error::InvalidArgument("cache_attention: keys must be float32, bfloat16 or int8");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CacheAttention, cache_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Lengths>()
                                  .Arg<Visibility>()
                                  .Arg<Places>()
                                  .Arg<Places>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Ret<ffi::AnyBuffer>());
