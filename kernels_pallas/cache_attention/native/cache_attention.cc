// Attention of new tokens over a cache on a CPU, called by XLA through its foreign function interface.
//
// A task takes up to kRows queries of one key/value head: all their scores, then the softmax, then the sum of the
// values. It reads no slot behind the last written one, nor those that have left the window of all its queries. Every
// number of the result is one chain of sums, over channels for a score and over slots for an output, and a slot that
// is not seen adds exactly nothing. So a query's result depends on what it sees and not on how many other queries, or
// unseen slots, stand in the call.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "exponential.h"
#include "kernel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using kernel::ceil_div;
using kernel::exponential;

namespace {

constexpr int64_t kRows = 32;       // queries of a task, whose scores lie in a second-level cache
constexpr int kLanes = 16;          // float32 numbers in a register
constexpr int kScoreRows = 8;       // queries that share a load of keys
constexpr int kOutRows = 4;         // queries that share a load of values
constexpr int kOutVectors = 4;      // registers of a value that they share
constexpr int64_t kWorkPerThread = 1 << 17;  // multiply-adds below which a thread costs more than it saves

using Lengths = ffi::Buffer<ffi::S32, 1>;
using Places = ffi::Buffer<ffi::S32, 2>;
using Visibility = ffi::Buffer<ffi::PRED, 3>;

#define KERNEL_UNROLL _Pragma("GCC unroll 16")

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

__m512 load(const float* p) { return _mm512_loadu_ps(p); }
__m512 load(const uint16_t* p) {
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}
__m512 load(const int8_t* p) {
  const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(narrow));
}

// cap * tanh(x / cap)
__m512 capped(__m512 x, float cap) {
  const __m512 size = _mm512_abs_ps(_mm512_div_ps(x, _mm512_set1_ps(cap)));
  const __m512 e = exponential(_mm512_mul_ps(size, _mm512_set1_ps(-2.f)));
  const __m512 one = _mm512_set1_ps(1.f);
  const __m512 tanh = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 value = _mm512_mul_ps(tanh, _mm512_set1_ps(cap));
  return _mm512_mask_sub_ps(value, negative, _mm512_setzero_ps(), value);
}

// The transpose of a 16 x 16 block of float32.
void transpose(__m512 (&rows)[kLanes]) {
  __m512 other[kLanes];
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
          case 2: sum<size, 2>(i, d, totals); break;
          case 3: sum<size, 3>(i, d, totals); break;
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
        __m512 block[kLanes];
        for (int j = 0; j < kLanes; ++j) {
          block[j] = j < here ? load(keys + (s + j) * p.dim + d) : _mm512_setzero_ps();
        }
        transpose(block);
        for (int j = 0; j < kLanes; ++j) _mm512_storeu_ps(keys_turned + (d + j) * kLanes, block[j]);
      }
      __m512 factor = _mm512_set1_ps(p.scale);
      if (scales != nullptr) {
        factor = _mm512_mul_ps(factor, _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << here) - 1), scales + s));
      }
      for_blocks<kScoreRows>(count, [&](auto size, int64_t i) {
        __m512 sums[size];
        for (int r = 0; r < size; ++r) sums[r] = _mm512_setzero_ps();
        const float* q = queries + i * p.dim;
        for (int64_t d = 0; d < p.dim; ++d) {
          const __m512 key = _mm512_loadu_ps(keys_turned + d * kLanes);
          KERNEL_UNROLL
          for (int r = 0; r < size; ++r) {
            sums[r] = _mm512_fmadd_ps(_mm512_set1_ps(q[r * p.dim + d]), key, sums[r]);
          }
        }
        for (int r = 0; r < size; ++r) {
          const __m512 value = _mm512_mul_ps(sums[r], factor);
          _mm512_storeu_ps(scores + (i + r) * stride + s, p.softcap > 0 ? capped(value, p.softcap) : value);
        }
      });
    }
  }

  // Which of the slots s .. s + 15 query i sees.
  __mmask16 seen(int64_t i, int64_t s) const {
    const int64_t n = node(i), from = oldest(n);
    if (s + kLanes <= length) return static_cast<__mmask16>(0xffff << std::clamp<int64_t>(from - s, 0, kLanes));
    const bool* visible = p.visible + (row * p.nodes + n) * p.fresh;
    const int32_t* at = p.slot_positions + row * p.fresh;
    __mmask16 mask = 0;
    for (int64_t j = 0; j < kLanes && s + j < slots; ++j) {
      const int64_t fresh = s + j - length;
      const bool sees = fresh < 0 ? s + j >= from : visible[fresh] && at[fresh] >= from;
      mask |= static_cast<__mmask16>(sees << j);
    }
    return mask;
  }

  // Scores of query i to weights, the largest of them 1; zeros where it does not see.
  void weigh(int64_t i) {
    float* own = scores + i * stride;
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (int64_t s = begin; s < stride; s += kLanes) {
      top = _mm512_mask_max_ps(top, seen(i, s), top, _mm512_loadu_ps(own + s));
    }
    const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int64_t s = begin; s < stride; s += kLanes) {
      const __m512 weight = exponential(_mm512_sub_ps(_mm512_loadu_ps(own + s), most));
      _mm512_storeu_ps(own + s, _mm512_maskz_mov_ps(seen(i, s), weight));
    }
  }

  // Channels d .. of the outputs of queries i ..
  template <int rows, int vectors>
  void sum(int64_t i, int64_t d, const float* totals) {
    __m512 sums[rows][vectors];
    for (int r = 0; r < rows; ++r) {
      for (int j = 0; j < vectors; ++j) sums[r][j] = _mm512_setzero_ps();
    }
    const float* weights = scores + i * stride;
    for (int64_t s = begin; s < slots; ++s) {
      const T* value = values + s * p.dim + d;
      __m512 loaded[vectors];
      KERNEL_UNROLL
      for (int j = 0; j < vectors; ++j) loaded[j] = load(value + j * kLanes);
      KERNEL_UNROLL
      for (int r = 0; r < rows; ++r) {
        const __m512 weight = _mm512_set1_ps(weights[r * stride + s]);
        KERNEL_UNROLL
        for (int j = 0; j < vectors; ++j) sums[r][j] = _mm512_fmadd_ps(weight, loaded[j], sums[r][j]);
      }
    }
    for (int r = 0; r < rows; ++r) {
      const __m512 total = _mm512_set1_ps(std::max(totals[i + r], 1e-30f));
      float result[vectors * kLanes];
      for (int j = 0; j < vectors; ++j) _mm512_storeu_ps(result + j * kLanes, _mm512_div_ps(sums[r][j], total));
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
  kernel::parallel_for(pool, threads, tasks, [&](int64_t index) { Task<T>(p, index, blocks).run(); });
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
