// The two products of attention, a few rows at a time. Keys and values are read directly from the pool, float32 or
// bfloat16.
//
// Both products read 32-bit words: a float, or two bfloat16 of neighbouring dimensions, which a shift and a mask turn
// into floats. For each word the keys of a block's tokens lie side by side (`KVCache`), so a vector holds one dimension
// of as many keys, and a loop over the dimensions serves them all. Values lie token by token.

#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "simd.h"

namespace actorserve::attention {

constexpr int64_t kTileVectors = 4;
constexpr int64_t kTileKeys = kTileVectors * kLanes;
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kBlockRows = kLanes == 16 ? 8 : 6;  // the sums of so many rows fit into the registers

// uint16_t stands for bfloat16: its bits.
template <typename T>
constexpr int64_t kNumbersPerWord = sizeof(uint32_t) / sizeof(T);

constexpr int64_t kLineBytes = 64;
template <typename T>
constexpr int64_t kLineNumbers = kLineBytes / static_cast<int64_t>(sizeof(T));

// How many vectors to compute together: enough independent sums to hide the latency of an addition.
template <int Rows>
constexpr int kVectors = Rows <= (kLanes == 16 ? 5 : 2) ? 4 : 2;

// A tile's keys: where each vector's first word lies, and the distance to its next word in numbers. Also where the next
// tile's keys lie: blocks lie anywhere in memory, so the processor cannot predict them, and each word prefetches one
// line. (Prefetching a whole tile at once stalls, because few memory requests can be in flight.)
template <typename T>
struct TileKeys {
  std::array<const T*, kTileVectors> vectors, next_vectors;
  int64_t stride;
};

// scores [Rows, Vectors vectors] = query [Rows, head_dim] keys, from vector `first` on. Each score is one chain of fused
// multiply-adds in the order of dimensions.
template <int Rows, int Vectors, typename T>
inline void score_block(const float* query, int64_t head_dim, const TileKeys<T>& keys, int64_t first, float* scores,
                        int64_t scores_stride) {
  Floats sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sums[r][v] = all(0.0f);
  }
  const T *vectors[Vectors], *next_vectors[Vectors];
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) {
    vectors[v] = keys.vectors[static_cast<size_t>(first + v)];
    next_vectors[v] = keys.next_vectors[static_cast<size_t>(first + v)];
  }
  const auto add_dimension = [&](int64_t d, const Floats(&numbers)[Vectors]) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Floats number = all(query[r * head_dim + d]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] = multiply_add(number, numbers[v], sums[r][v]);
    }
  };
  for (int64_t d = 0, at = 0; d < head_dim; d += kNumbersPerWord<T>, at += keys.stride) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) fetch_line(next_vectors[v] + at);
    Floats numbers[Vectors];
    if constexpr (kNumbersPerWord<T> == 1) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) numbers[v] = load(vectors[v] + at);
      add_dimension(d, numbers);
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) numbers[v] = low_half(load_words(vectors[v] + at));
      add_dimension(d, numbers);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) numbers[v] = high_half(load_words(vectors[v] + at));
      add_dimension(d + 1, numbers);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(scores + r * scores_stride + (first + v) * kLanes, sums[r][v]);
  }
}

// All vectors of a tile.
template <int Rows, typename T>
inline void score_tile(const float* query, int64_t head_dim, const TileKeys<T>& keys, float* scores,
                       int64_t scores_stride) {
  for (int64_t first = 0; first < kTileVectors; first += kVectors<Rows>) {
    score_block<Rows, kVectors<Rows>>(query, head_dim, keys, first, scores, scores_stride);
  }
}

// Weighted values are summed in pairs of vectors. A pair holds its numbers as words give them: of bfloat16, first the
// even dimensions, then the odd ones.
inline void load_pair(const float* from, Floats& first, Floats& second) {
  first = load(from);
  second = load(from + kLanes);
}
inline void load_pair(const uint16_t* from, Floats& first, Floats& second) {
  const Words words = load_words(from);
  first = low_half(words);
  second = high_half(words);
}

// The index of a dimension's sum.
template <typename T>
inline int64_t place_of(int64_t d) {
  constexpr int64_t per_word = kNumbersPerWord<T>;
  const int64_t in_pair = d % (2 * kLanes);
  return per_word == 1 ? d : d - in_pair + in_pair % per_word * kLanes + in_pair / per_word;
}

// sums [Rows, Vectors vectors] += weights [Rows, count] values [count], from number `offset` of each value on. Each sum is
// one chain of fused multiply-adds in the order of the values. `next_values` are those of the next tile, which are
// prefetched.
template <int Rows, int Vectors, typename T>
inline void gather_block(const float* weights, int64_t weights_stride, const T* const* values,
                         const T* const* next_values, int64_t offset, int64_t count, float* sums, int64_t sums_stride) {
  Floats out[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) out[r][v] = load(sums + r * sums_stride + offset + v * kLanes);
  }
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t at = 0; at < Vectors * kLanes; at += kLineNumbers<T>) fetch_line(next_values[k] + offset + at);
    Floats numbers[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v += 2) load_pair(values[k] + offset + v * kLanes, numbers[v], numbers[v + 1]);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Floats weight = all(weights[r * weights_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) out[r][v] = multiply_add(weight, numbers[v], out[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(sums + r * sums_stride + offset + v * kLanes, out[r][v]);
  }
}

// All dimensions.
template <int Rows, typename T>
inline void gather_rows(const float* weights, int64_t weights_stride, const T* const* values,
                        const T* const* next_values, int64_t padded_dim, int64_t count, float* sums,
                        int64_t sums_stride) {
  int64_t d = 0;
  if constexpr (kVectors<Rows> == 4) {
    for (; d + 4 * kLanes <= padded_dim; d += 4 * kLanes) {
      gather_block<Rows, 4>(weights, weights_stride, values, next_values, d, count, sums, sums_stride);
    }
  }
  for (; d < padded_dim; d += 2 * kLanes) {
    gather_block<Rows, 2>(weights, weights_stride, values, next_values, d, count, sums, sums_stride);
  }
}

// The products for 1 to kBlockRows rows.
template <typename T>
struct Products {
  using Score = void (*)(const float*, int64_t, const TileKeys<T>&, float*, int64_t);
  using Gather = void (*)(const float*, int64_t, const T* const*, const T* const*, int64_t, int64_t, float*, int64_t);
  template <int... Rows>
  static constexpr auto scores_of(std::integer_sequence<int, Rows...>) {
    return std::array<Score, sizeof...(Rows)>{score_tile<Rows + 1, T>...};
  }
  template <int... Rows>
  static constexpr auto gathers_of(std::integer_sequence<int, Rows...>) {
    return std::array<Gather, sizeof...(Rows)>{gather_rows<Rows + 1, T>...};
  }
  static constexpr auto score = scores_of(std::make_integer_sequence<int, kBlockRows>());
  static constexpr auto gather = gathers_of(std::make_integer_sequence<int, kBlockRows>());
};

}  // namespace actorserve::attention
