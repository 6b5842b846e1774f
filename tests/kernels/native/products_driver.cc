// Products of the kernel that KERNEL_SOURCE names against plain loops, and a row in a call of many against the row
// alone, for processors that the tests run under an emulator. Says what differs and ends with status 1, else "ok".

#include KERNEL_SOURCE

#include <cmath>
#include <array>
#include <cstdio>
#include <random>

namespace {

// Tasks run where they are scheduled, in turn.
struct Pool {
  int64_t num_threads() const { return 3; }
  template <typename Task>
  void Schedule(Task&& task) { task(); }
};

std::mt19937 generator(0);
int failures = 0;

float widened(int8_t x) { return x; }
float widened(float x) { return x; }
float widened(uint16_t x) { return kernel::from_bfloat16(x); }

template <typename T>
T number(int low, int high) {
  const int value = std::uniform_int_distribution<int>(low, high)(generator);
  if constexpr (std::is_same_v<T, uint16_t>) {
    return kernel::to_bfloat16(static_cast<float>(value) / 8);
  } else if constexpr (std::is_same_v<T, float>) {
    return static_cast<float>(value) / 7;
  } else {
    return static_cast<T>(value);
  }
}

// Compares all rows at once, and each alone, with sums in double; `exact`: they have the same bits.
template <typename X, typename Weight, typename Multiply>
void check(const char* name, kernel::Product p, const std::vector<X>& x, const Weight& weight, bool exact,
           const Multiply& multiply) {
  Pool pool;
  std::vector<float> out(p.rows * p.columns), alone(p.columns);
  p.out = out.data();
  multiply(pool, p, x.data());
  kernel::Product one = p;
  one.rows = 1;
  one.out = alone.data();
  for (int64_t r = 0; r < p.rows; ++r) {
    if (p.x_scales != nullptr) one.x_scales = p.x_scales + r;
    multiply(pool, one, x.data() + r * p.k);
    for (int64_t c = 0; c < p.columns; ++c) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < p.k; ++k) {
        const double product = static_cast<double>(widened(x[r * p.k + k])) * weight(k, c);
        sum += product, size += std::fabs(product);
      }
      const float got = out[r * p.columns + c];
      const bool right = exact ? got == static_cast<float>(sum) : std::fabs(got - sum) <= 2e-6 * size + 1e-30;
      if (!right || got != alone[c]) {
        if (++failures < 9) std::printf("%s: row %d column %d: %g alone %g, want %g\n", name, int(r), int(c), got, alone[c], sum);
      }
    }
  }
}

#if defined(KERNEL_QUANT)
template <typename X, bool packed>
void check_quant(const char* name, int64_t rows, int64_t k, int64_t columns, int64_t groups) {
  constexpr bool integers = std::is_same_v<X, int8_t>;
  const int64_t stored = packed ? k / 2 : k;
  std::vector<X> x(rows * k);
  for (X& value : x) value = number<X>(-128, 127);
  std::vector<int8_t> w(stored * columns);
  for (int8_t& value : w) value = number<int8_t>(-128, 127);
  std::fill_n(w.begin(), columns, -128), std::fill_n(x.begin(), k, number<X>(-128, -128));
  // Powers of two, so that scales round nothing.
  std::vector<float> scales(groups * columns), x_scales(rows, 1.0f);
  for (float& scale : scales) scale = std::ldexp(1.0f, number<int8_t>(-3, 3));
  kernel::Product p{rows, k, stored, columns, groups, reinterpret_cast<const char*>(w.data()), 1, scales.data(),
                    integers ? x_scales.data() : nullptr, nullptr, false};
  const auto weight = [&](int64_t row, int64_t column) {
    const int8_t byte = w[(packed ? row / 2 : row) * columns + column];
    const int value = !packed ? byte : row % 2 ? byte >> 4 : static_cast<int8_t>(byte << 4) >> 4;
    return value * static_cast<double>(scales[row * groups / k * columns + column]);
  };
  check(name, p, x, weight, integers, [](Pool& pool, const kernel::Product& p, const X* x) { multiply<packed>(pool, p, x); });
}
#else
template <typename T>
void check_dense(const char* name, int64_t rows, int64_t k, int64_t columns) {
  std::vector<T> x(rows * k), w(k * columns), turned(k * columns);
  for (T& value : x) value = number<T>(-99, 99);
  for (int64_t i = 0; i < k * columns; ++i) w[i] = turned[i % columns * k + i / columns] = number<T>(-99, 99);
  kernel::Product p{rows, k, k, columns, 1, reinterpret_cast<const char*>(w.data()), sizeof(T), nullptr, nullptr, nullptr,
                    false};
  const auto weight = [&](int64_t row, int64_t column) { return static_cast<double>(widened(w[row * columns + column])); };
  check(name, p, x, weight, false, [](Pool& pool, const kernel::Product& p, const T* x) { multiply(pool, p, x); });
  p.w = reinterpret_cast<const char*>(turned.data());
  check(name, p, x, weight, false,
        [](Pool& pool, const kernel::Product& p, const T* x) { multiply_transposed(pool, p, x); });
}
#endif

}  // namespace

int main() {
#if defined(KERNEL_QUANT)
  for (const auto& [rows, k, columns, groups] : {std::array<int64_t, 4>{9, 330, 150, 1}, {17, 96, 70, 3}, {2, 1088, 64, 1}}) {
    check_quant<int8_t, false>("int8 8 bits", rows, k, columns, groups);
    check_quant<int8_t, true>("int8 4 bits", rows, k, columns, groups);
    check_quant<uint16_t, false>("bfloat16 8 bits", rows, k, columns, groups);
    check_quant<float, true>("float32 4 bits", rows, k, columns, groups);
  }
#else
  for (const auto& [rows, k, columns] : {std::array<int64_t, 3>{9, 331, 150}, {17, 96, 70}, {2, 1101, 64}}) {
    check_dense<uint16_t>("bfloat16", rows, k, columns);
    check_dense<float>("float32", rows, k, columns);
  }
#endif
  if (failures == 0) std::puts("ok");
  return failures != 0;
}
