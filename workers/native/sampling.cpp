// Chooses each row's next token (workers/sampling/token_choice.py has the rules). A row is computed by one thread, in
// one order, so its token depends neither on the other rows nor on the number of threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "simd.h"
#include "threads.h"

namespace actorserve {
namespace {

using at::Tensor;

constexpr int64_t kEight = kLanesOf<Eight>;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kWeightBits = 42;  // the best token's weight is 2^42, so sums over 2^20 tokens stay below 2^63
constexpr double kLowestExponent = -30.0;  // e^-30 * 2^42 is below 1
constexpr int64_t kRuleFields = 5;

struct Rule {
  double temperature, top_p;
  int64_t top_k;
  double min_p, uniform;

  explicit Rule(const double* fields)
      : temperature(fields[0]), top_p(fields[1]), top_k(static_cast<int64_t>(fields[2])), min_p(fields[3]),
        uniform(fields[4]) {}
};

// --- weights ---------------------------------------------------------------------------------------------------------

typedef double Four __attribute__((vector_size(32)));
typedef int64_t FourIntegers __attribute__((vector_size(32)));
typedef float FourFloats __attribute__((vector_size(16)));
typedef int32_t EightIntegers __attribute__((vector_size(32)));

inline bool any(EightIntegers lanes) { return _mm256_movemask_ps(reinterpret_cast<Eight>(lanes)) != 0; }
inline bool any(FourIntegers lanes) { return _mm256_movemask_pd(reinterpret_cast<Four>(lanes)) != 0; }

inline Four four(double x) { return x - Four{}; }
inline Four multiply_add(Four a, Four b, Four c) { return _mm256_fmadd_pd(a, b, c); }

// 1 / n!, from n = 11 down
constexpr double kSeries[] = {2.5052108385441720e-8, 2.7557319223985888e-7, 2.7557319223985893e-6,
                              2.4801587301587302e-5, 1.9841269841269841e-4, 1.3888888888888889e-3,
                              8.3333333333333333e-3, 4.1666666666666667e-2, 1.6666666666666667e-1, 0.5, 1.0, 1.0};

// floor(e^x * 2^42) for x <= 0: x = n ln 2 + r, the series of e^r, and n + 42 into the exponent.
inline FourIntegers weigh(Four x) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: the low bits are round(n)
  const Four bounded = x < kLowestExponent ? four(kLowestExponent) : x;
  const Four shifted = multiply_add(bounded, four(1.44269504088896341), four(kMagic));
  const Four n = shifted - kMagic;
  const Four r = multiply_add(n, four(-1.90821492927058770e-10),
                              multiply_add(n, four(-6.93147180369123816e-1), bounded));
  Four y = four(kSeries[0]);
#pragma GCC unroll 16
  for (size_t i = 1; i < std::size(kSeries); ++i) y = multiply_add(y, r, four(kSeries[i]));
  const FourIntegers exponent = (reinterpret_cast<FourIntegers>(shifted) + kWeightBits) << 52;
  const Four scaled = reinterpret_cast<Four>(reinterpret_cast<FourIntegers>(y) + exponent);
  return __builtin_convertvector(scaled, FourIntegers);
}

// Weights of `size` logits, zero below `lowest`.
void weigh_row(const float* logits, int64_t size, double best, double temperature, double lowest, int64_t* weights) {
  // The greatest double, so that 0 times it is 0 at any temperature.
  const double scale = std::min(1.0 / temperature, std::numeric_limits<double>::max());
  const double least = std::max(lowest, best + kLowestExponent * temperature);
  const auto weigh_four = [&](const float* from, int64_t* to) {
    FourFloats lanes;
    std::memcpy(&lanes, from, sizeof(lanes));
    const Four wide = __builtin_convertvector(lanes, Four);
    FourIntegers found = {};
    if (any(wide >= least)) found = wide >= lowest ? weigh((wide - best) * scale) : found;
    std::memcpy(to, &found, sizeof(found));
  };
  int64_t i = 0;
  for (; i + 4 <= size; i += 4) weigh_four(logits + i, weights + i);
  if (i == size) return;
  float last[4] = {-kInfinity, -kInfinity, -kInfinity, -kInfinity};
  int64_t found[4];
  std::copy(logits + i, logits + size, last);
  weigh_four(last, found);
  std::copy_n(found, size - i, weights + i);
}

// --- thresholds ------------------------------------------------------------------------------------------------------

// The k-th greatest of these logits, 0 < k <= size.
float kth_greatest(const float* logits, int64_t size, int64_t k) {
  static thread_local std::vector<float> greatest;
  const size_t limit = static_cast<size_t>(std::max<int64_t>(4 * k, 512));
  const auto prune = [&] {
    std::nth_element(greatest.begin(), greatest.begin() + (k - 1), greatest.end(), std::greater<>());
    greatest.resize(static_cast<size_t>(k));
    return greatest.back();
  };
  greatest.assign(logits, logits + k);
  float threshold = -kInfinity;
  for (int64_t i = k; i < size; i += kEight) {
    const int64_t count = std::min(kEight, size - i);
    if (!any(load(logits + i, count) > threshold)) continue;
    for (int64_t lane = 0; lane < count; ++lane) {
      if (logits[i + lane] > threshold) greatest.push_back(logits[i + lane]);
    }
    if (greatest.size() >= limit) threshold = prune();
  }
  return prune();
}

// The least of the greatest weights that first reach `wanted` of the sum. Reorders the weights.
int64_t least_of_the_greatest(std::vector<int64_t>& weights, int64_t wanted) {
  auto begin = weights.begin(), end = weights.end();
  while (true) {
    const int64_t first = *begin, middle = begin[(end - begin) / 2], last = end[-1];
    const int64_t pivot = std::max(std::min(first, middle), std::min(std::max(first, middle), last));
    const auto equal = std::partition(begin, end, [pivot](int64_t weight) { return weight > pivot; });
    const int64_t greater_sum = std::accumulate(begin, equal, int64_t{0});
    if (wanted <= greater_sum) {
      end = equal;
      continue;
    }
    const auto less = std::partition(equal, end, [pivot](int64_t weight) { return weight == pivot; });
    wanted -= greater_sum + pivot * (less - equal);
    if (wanted <= 0 || less == end) return pivot;
    begin = less;
  }
}

int64_t top_p_threshold(const std::vector<int64_t>& weights, double top_p) {
  static thread_local std::vector<int64_t> greatest;
  const int64_t total = std::accumulate(weights.begin(), weights.end(), int64_t{0});
  const auto share = static_cast<int64_t>(std::ceil(top_p * static_cast<double>(total)));
  const int64_t wanted = std::clamp<int64_t>(share, 1, total);
  // All weights up to this bound together are at most total - wanted, so the others reach `wanted`. A language model
  // leaves some hundreds of tokens above it.
  const int64_t bound = (total - wanted) / static_cast<int64_t>(weights.size());
  greatest.resize(weights.size() + 1);
  size_t count = 0;
  for (const int64_t weight : weights) {
    greatest[count] = weight;  // and the next one overwrites it, unless it counts
    count += weight > bound;
  }
  greatest.resize(count);
  return least_of_the_greatest(greatest, wanted);
}

void drop_below(int64_t least, std::vector<int64_t>& weights) {
  for (int64_t& weight : weights) weight = weight < least ? 0 : weight;
}

// --- a row -----------------------------------------------------------------------------------------------------------

// The logits whose bits are set in `allowed`, and minus infinity in place of the others.
void mask(const float* logits, const uint8_t* allowed, int64_t size, float* to) {
  const EightWords bits = {1, 2, 4, 8, 16, 32, 64, 128};
  for (int64_t i = 0; i < size; i += kEight) {
    const EightWords chosen = (bits & static_cast<uint32_t>(allowed[i / 8])) != 0u;
    store(to + i, chosen ? load(logits + i, size - i) : all<Eight>(-kInfinity), size - i);
  }
}

// The greatest logit, or NaN if a logit is NaN.
float find_best(const float* logits, int64_t size) {
  Eight highest = all<Eight>(-kInfinity);
  EightIntegers nans = {};
  for (int64_t i = 0; i + kEight <= size; i += kEight) {
    const Eight lanes = load(logits + i, kEight);
    nans |= lanes != lanes;
    highest = lanes > highest ? lanes : highest;
  }
  float best = join_lanes(highest, [](float a, float b) { return a > b ? a : b; });
  bool has_nan = any(nans);
  for (int64_t i = size / kEight * kEight; i < size; ++i) {
    has_nan |= std::isnan(logits[i]);
    best = std::max(best, logits[i]);
  }
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : best;
}

// The first token with the best logit, or the first NaN; of logits that are all minus infinity the first allowed token.
int64_t first_best(const float* logits, int64_t size, float best, const uint8_t* allowed) {
  const auto is_chosen = [&](int64_t token) {
    if (best == -kInfinity) return allowed == nullptr || (allowed[token / 8] >> (token % 8) & 1);
    return logits[token] == best || std::isnan(logits[token]);
  };
  int64_t token = 0;
  if (best > -kInfinity) {
    while (token + kEight <= size && !any(load(logits + token, kEight) == best)) token += kEight;
  }
  while (token < size && !is_chosen(token)) ++token;
  return token < size ? token : 0;
}

// The first token at which the cumulative weight exceeds `uniform` times the total.
int64_t draw(const std::vector<int64_t>& weights, double uniform) {
  const int64_t total = std::accumulate(weights.begin(), weights.end(), int64_t{0});
  int64_t left = std::min(static_cast<int64_t>(uniform * static_cast<double>(total)), total - 1);
  constexpr size_t kStride = 64;
  size_t token = 0;
  for (; token + kStride <= weights.size(); token += kStride) {
    const auto from = weights.begin() + static_cast<std::ptrdiff_t>(token);
    const int64_t sum = std::accumulate(from, from + kStride, int64_t{0});
    if (left < sum) break;
    left -= sum;
  }
  for (; token < weights.size() && left >= weights[token]; ++token) left -= weights[token];
  return static_cast<int64_t>(token);
}

int64_t choose_row(const float* logits, int64_t size, const uint8_t* allowed, const Rule& rule) {
  static thread_local std::vector<float> masked;
  static thread_local std::vector<int64_t> weights;
  if (allowed != nullptr) {
    masked.resize(static_cast<size_t>(size));
    mask(logits, allowed, size, masked.data());
    logits = masked.data();
  }
  const float best = find_best(logits, size);
  if (rule.temperature <= 0.0 || !std::isfinite(best)) return first_best(logits, size, best, allowed);
  const bool is_ranked = 0 < rule.top_k && rule.top_k < size;
  const float lowest = is_ranked ? kth_greatest(logits, size, rule.top_k) : -kInfinity;
  weights.resize(static_cast<size_t>(size));
  weigh_row(logits, size, best, rule.temperature, lowest, weights.data());
  if (rule.min_p > 0.0) drop_below(static_cast<int64_t>(rule.min_p * (int64_t{1} << kWeightBits)), weights);
  if (rule.top_p < 1.0) drop_below(top_p_threshold(weights, rule.top_p), weights);
  return draw(weights, rule.uniform);
}

// logits: [B, V] float32. rules: [B, 5] float64: temperature, top_p, top_k, min_p, uniform. masks: [B] int64, each row's
// row in `allowed` [M, ceil(V / 8)] uint8, or -1. Returns the tokens, [B] int64.
Tensor choose(const Tensor& logits, const Tensor& rules, const Tensor& masks, const Tensor& allowed) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.scalar_type() == at::kFloat && logits.is_contiguous(),
              "logits must be float32 [rows, vocabulary] on the CPU");
  const int64_t num_rows = logits.size(0), size = logits.size(1), mask_bytes = (size + 7) / 8;
  TORCH_CHECK(rules.scalar_type() == at::kDouble && rules.is_contiguous() && rules.numel() == num_rows * kRuleFields,
              "rules must be float64 [rows, ", kRuleFields, "]");
  TORCH_CHECK(masks.scalar_type() == at::kLong && masks.is_contiguous() && masks.numel() == num_rows,
              "masks must be int64 [rows]");
  TORCH_CHECK(allowed.scalar_type() == at::kByte && allowed.is_contiguous() && allowed.dim() == 2 &&
                  allowed.size(1) == mask_bytes,
              "allowed must be uint8 [masks, ", mask_bytes, "]");
  const int64_t* mask_of = masks.const_data_ptr<int64_t>();
  TORCH_CHECK(std::all_of(mask_of, mask_of + num_rows, [&](int64_t row) { return row < allowed.size(0); }),
              "a row's mask is not among the masks");
  Tensor chosen = at::empty({num_rows}, masks.options());
  int64_t* tokens = chosen.data_ptr<int64_t>();
  const float* numbers = logits.const_data_ptr<float>();
  const double* fields = rules.const_data_ptr<double>();
  const uint8_t* bits = allowed.const_data_ptr<uint8_t>();
  parallel_for(num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint8_t* own = mask_of[row] < 0 ? nullptr : bits + mask_of[row] * mask_bytes;
      tokens[row] = choose_row(numbers + row * size, size, own, Rule(fields + row * kRuleFields));
    }
  });
  return chosen;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(actorserve, m) {
  m.def("choose(Tensor logits, Tensor rules, Tensor masks, Tensor allowed) -> Tensor", &choose);
}

}  // namespace actorserve
