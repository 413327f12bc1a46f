// A unit of work: neighbouring queries of one request, with the heads that share one KV head, over that head's keys.
//
// A row (one query, one head) depends only on itself and its own keys. Keys are cut into partitions of 256 at absolute
// positions. Within a partition a key's score is one chain over the dimensions; the maximum is exact; the weights'
// sum has a lane per position modulo the vector's width; a weighted value is one chain over the keys. Keys that a row
// does not see never enter. Partitions are merged from the first to the last, as in "FlashDecoding" (Dao et al., 2023).

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention_tiles.h"

namespace actorserve::attention {

constexpr int64_t kPartitionKeys = 256;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The values that all units of a call share. Strides are in numbers.
template <typename T>
struct Call {
  const float* query;
  int64_t query_token_stride, query_head_stride;
  const T* keys;
  const T* values;
  int64_t key_head_stride, key_block_stride, value_head_stride, value_slot_stride;
  float* out;  // [T, num_heads, head_dim]
  int64_t num_heads, heads_per_group, head_dim, tokens_per_block;
  int64_t window;  // how many keys a query sees; no limit is a number beyond every position
  float scale;

  int64_t padded_dim() const { return (head_dim + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }
};

// Floats aligned to lines of memory, because loading a vector from two lines is slower.
constexpr int64_t kLineFloats = kLineBytes / static_cast<int64_t>(sizeof(float));
inline int64_t lines(int64_t num_floats) { return (num_floats + kLineFloats - 1) / kLineFloats * kLineFloats; }

struct Unit {
  const int32_t* blocks;  // of the request
  int64_t first_token, first_position, num_queries;

  int64_t end() const { return first_position + num_queries; }
  int64_t begin(int64_t window) const { return std::max<int64_t>(0, first_position - window + 1); }
  int64_t first_partition(int64_t window) const { return begin(window) / kPartitionKeys; }
  int64_t end_partition() const { return (end() + kPartitionKeys - 1) / kPartitionKeys; }
};

// Softmax over some of the keys, for each row: the highest score, the weights' sum, and [padded_dim] weighted values.
struct Partial {
  float *sums, *highest, *total;

  Partial(float* memory, int64_t num_rows, int64_t padded_dim)
      : sums(memory), highest(memory + num_rows * padded_dim), total(highest + num_rows) {}
  static int64_t size(int64_t num_rows, int64_t padded_dim) { return lines(num_rows * (padded_dim + 2)); }
};

struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

template <typename T>
class UnitWork {
 public:
  // `memory` belongs to the thread, and grows on demand.
  UnitWork(const Call<T>& call, const Unit& unit, int64_t kv_head, std::vector<float>& memory)
      : call_(call),
        unit_(unit),
        keys_(call.keys + kv_head * call.key_head_stride),
        values_(call.values + kv_head * call.value_head_stride),
        first_head_(kv_head * call.heads_per_group),
        num_rows_(unit.num_queries * call.heads_per_group),
        padded_dim_(call.padded_dim()) {
    const int64_t partial = Partial::size(num_rows_, padded_dim_);
    const int64_t sizes[] = {kTileKeys * padded_dim_, num_rows_ * kPartitionKeys, partial, partial,
                             num_rows_ * call.head_dim};
    int64_t total = kLineFloats;
    for (const int64_t size : sizes) total += size;
    if (static_cast<int64_t>(memory.size()) < total) memory.resize(static_cast<size_t>(total));
    tile_ = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) % kLineBytes) / sizeof(float);
    weights_ = tile_ + sizes[0];
    merged_ = weights_ + sizes[1];
    partial_ = merged_ + sizes[2];
    query_ = partial_ + sizes[3];
    for (int64_t row = 0; row < num_rows_; ++row) {
      const float* from = call.query + token(row) * call.query_token_stride + head(row) * call.query_head_stride;
      for (int64_t d = 0; d < call.head_dim; ++d) query_[row * call.head_dim + d] = from[d] * call.scale;
    }
  }

  // Attends to all of the unit's keys, and writes the call's output.
  void run() {
    const Partial merged(merged_, num_rows_, padded_dim_);
    std::fill_n(merged.highest, num_rows_, kMinusInfinity);
    for (int64_t partition = unit_.first_partition(call_.window); partition < unit_.end_partition(); ++partition) {
      const Partial partial(partial_, num_rows_, padded_dim_);
      attend(partition, partial);
      merge(partition, partial, merged);
    }
    write(merged);
  }

  // Attends to one partition, and writes to memory of Partial::size.
  void attend(int64_t partition, const Partial& out) {
    const int64_t origin = partition * kPartitionKeys;
    const Range seen = {std::max(origin, unit_.begin(call_.window)), std::min(origin + kPartitionKeys, unit_.end())};
    const int64_t first = seen.begin / kTileKeys * kTileKeys;
    for (int64_t tile = first; tile < seen.end; tile += kTileKeys) score(tile, origin, seen);
    for (int64_t row = 0; row < num_rows_; ++row) weigh(row, origin, out);
    std::fill_n(out.sums, num_rows_ * padded_dim_, 0.0f);
    for (int64_t tile = first; tile < seen.end; tile += kTileKeys) gather(tile, origin, seen, out);
  }

  // Merges `partial` of `partition` into `merged`, row by row. Rows that see none of its keys do not change.
  void merge(int64_t partition, const Partial& partial, const Partial& merged) {
    const int64_t origin = partition * kPartitionKeys;
    for (int64_t row = 0; row < num_rows_; ++row) {
      const Range range = seen_by(row);
      if (Range{std::max(origin, range.begin), std::min(origin + kPartitionKeys, range.end)}.empty()) continue;
      const float* from = partial.sums + row * padded_dim_;
      float* to = merged.sums + row * padded_dim_;
      if (range.begin >= origin) {  // the row's first partition
        merged.highest[row] = partial.highest[row];
        merged.total[row] = partial.total[row];
        std::copy_n(from, padded_dim_, to);
        continue;
      }
      const float top = std::max(merged.highest[row], partial.highest[row]);
      const float old_scale = exp_of_negative(merged.highest[row] - top);
      const float new_scale = exp_of_negative(partial.highest[row] - top);
      merged.highest[row] = top;
      merged.total[row] = merged.total[row] * old_scale + partial.total[row] * new_scale;
      for (int64_t d = 0; d < padded_dim_; d += kLanes) {
        const Floats added = load(from + d) * all(new_scale);
        store(to + d, multiply_add(load(to + d), all(old_scale), added));
      }
    }
  }

  void write(const Partial& merged) {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const float* from = merged.sums + row * padded_dim_;
      float* to = call_.out + (token(row) * call_.num_heads + head(row)) * call_.head_dim;
      for (int64_t d = 0; d < call_.head_dim; ++d) to[d] = from[place_of<T>(d)] / merged.total[row];
    }
  }

 private:
  int64_t token(int64_t row) const { return unit_.first_token + row / call_.heads_per_group; }
  int64_t head(int64_t row) const { return first_head_ + row % call_.heads_per_group; }

  // Both ends grow with the row.
  Range seen_by(int64_t row) const {
    const int64_t position = unit_.first_position + row / call_.heads_per_group;
    return {std::max<int64_t>(0, position - call_.window + 1), position + 1};
  }

  // A key's first word.
  const T* key_at(int64_t position) const {
    const int64_t block = position / call_.tokens_per_block, offset = position - block * call_.tokens_per_block;
    return keys_ + unit_.blocks[block] * call_.key_block_stride + offset * kNumbersPerWord<T>;
  }

  const T* value_at(int64_t position) const {
    const int64_t block = position / call_.tokens_per_block, offset = position - block * call_.tokens_per_block;
    return values_ + (unit_.blocks[block] * call_.tokens_per_block + offset) * call_.value_slot_stride;
  }

  int64_t block_end(int64_t position) const {
    return (position / call_.tokens_per_block + 1) * call_.tokens_per_block;
  }

  // A tile's keys before `end`. Its vectors may also hold keys of other requests, which may be any numbers.
  TileKeys<T> keys_of(int64_t tile, int64_t end) {
    TileKeys<T> keys;
    keys.stride = call_.tokens_per_block * kNumbersPerWord<T>;
    if (call_.tokens_per_block % kLanes != 0) {  // vectors would cross the ends of blocks
      keys.vectors = keys.next_vectors = copied_keys(tile, end);
      keys.stride = kTileKeys * kNumbersPerWord<T>;
      return keys;
    }
    for (size_t v = 0; v < kTileVectors; ++v) {
      const int64_t position = tile + static_cast<int64_t>(v) * kLanes, next = position + kTileKeys;
      keys.vectors[v] = key_at(position < end ? position : tile);
      keys.next_vectors[v] = next < unit_.end() ? key_at(next) : keys.vectors[v];
    }
    return keys;
  }

  std::array<const T*, kTileVectors> copied_keys(int64_t tile, int64_t end) {
    constexpr int64_t per_word = kNumbersPerWord<T>;
    T* const copy = reinterpret_cast<T*>(tile_);
    for (int64_t position = tile, next; position < std::min(tile + kTileKeys, end); position = next) {
      next = std::min({tile + kTileKeys, end, block_end(position)});
      const T* from = key_at(position);
      T* to = copy + (position - tile) * per_word;
      for (int64_t d = 0; d < call_.head_dim; d += per_word) {
        std::copy_n(from, (next - position) * per_word, to);
        from += call_.tokens_per_block * per_word;
        to += kTileKeys * per_word;
      }
    }
    std::array<const T*, kTileVectors> vectors;
    for (size_t v = 0; v < kTileVectors; ++v) vectors[v] = copy + static_cast<int64_t>(v) * kLanes * per_word;
    return vectors;
  }

  void score(int64_t tile, int64_t origin, const Range& seen) {
    const int64_t dim = call_.head_dim;
    const TileKeys<T> keys = keys_of(tile, seen.end);
    for (int64_t row = 0; row < num_rows_; row += kBlockRows) {
      const int64_t count = std::min(kBlockRows, num_rows_ - row);
      if (seen_by(row).begin >= tile + kTileKeys || seen_by(row + count - 1).end <= tile) continue;
      float* scores = weights_ + row * kPartitionKeys + tile - origin;
      Products<T>::score[static_cast<size_t>(count - 1)](query_ + row * dim, dim, keys, scores, kPartitionKeys);
    }
  }

  // Turns a row's scores into weights.
  void weigh(int64_t row, int64_t origin, const Partial& out) {
    const Range range = seen_by(row);
    const int64_t begin = std::max<int64_t>(0, range.begin - origin);
    const int64_t end = std::min(kPartitionKeys, range.end - origin);
    float* weights = weights_ + row * kPartitionKeys;
    const int64_t first = begin / kLanes * kLanes;
    Floats top = all(kMinusInfinity);
    for (int64_t i = first; i < end; i += kLanes) {
      const Floats scores = keep(load(weights + i), begin - i, end - i, all(kMinusInfinity));
      store(weights + i, scores);
      top = highest(scores, top);
    }
    out.highest[row] = highest_of_lanes(top);
    const Floats subtracted = all(out.highest[row]);
    Floats total = all(0.0f);
    for (int64_t i = first; i < end; i += kLanes) {
      const Floats weight = exp_of_negative(load(weights + i) - subtracted);
      store(weights + i, weight);
      total += weight;
    }
    out.total[row] = sum_of_lanes(total);
  }

  // Adds the tile's values times the rows' weights to their sums.
  void gather(int64_t tile, int64_t origin, const Range& seen, const Partial& out) {
    const Range present = {std::max(tile, seen.begin), std::min(tile + kTileKeys, seen.end)};
    std::array<const T*, kTileKeys> values, next_values;  // from the first present one
    for (int64_t position = present.begin; position < present.end;) {
      const T* at = value_at(position);
      for (const int64_t end = std::min(present.end, block_end(position)); position < end; ++position) {
        values[static_cast<size_t>(position - present.begin)] = padded(at, position - tile);
        at += call_.value_slot_stride;
      }
    }
    for (int64_t k = 0; k < present.end - present.begin;) {
      const int64_t position = std::min(present.begin + kTileKeys + k, unit_.end() - 1);
      const T* at = value_at(position);
      for (int64_t left = block_end(position) - position; left > 0 && k < kTileKeys; --left, ++k) {
        next_values[static_cast<size_t>(k)] = at;
        at += call_.value_slot_stride;
      }
    }
    const auto add_keys = [&](int64_t row, int64_t count, Range keys) {
      if (keys.empty()) return;
      Products<T>::gather[static_cast<size_t>(count - 1)](
          weights_ + row * kPartitionKeys + keys.begin - origin, kPartitionKeys,
          values.data() + (keys.begin - present.begin), next_values.data() + (keys.begin - present.begin), padded_dim_,
          keys.end - keys.begin, out.sums + row * padded_dim_, padded_dim_);
    };
    const auto within = [&](Range range) {
      return Range{std::max(range.begin, present.begin), std::min(range.end, present.end)};
    };
    for (int64_t row = 0; row < num_rows_; row += kBlockRows) {
      const int64_t count = std::min(kBlockRows, num_rows_ - row);
      Range common = within({seen_by(row + count - 1).begin, seen_by(row).end});
      if (common.empty()) common = {present.end, present.end};
      for (int64_t one = row; one < row + count; ++one) {
        const Range range = within(seen_by(one));
        add_keys(one, 1, {range.begin, std::min(range.end, common.begin)});
      }
      add_keys(row, count, common);
      for (int64_t one = row; one < row + count; ++one) {
        add_keys(one, 1, {common.end, within(seen_by(one)).end});
      }
    }
  }

  // Copies a value whose numbers do not fill whole pairs of vectors to memory where they do.
  const T* padded(const T* value, int64_t number) {
    if (call_.head_dim == padded_dim_) return value;
    T* to = reinterpret_cast<T*>(tile_) + number * padded_dim_;
    std::fill(std::copy_n(value, call_.head_dim, to), to + padded_dim_, T{0});
    return to;
  }

  const Call<T>& call_;
  const Unit unit_;
  const T* keys_;
  const T* values_;
  int64_t first_head_, num_rows_, padded_dim_;
  float *tile_, *weights_, *query_, *merged_, *partial_;
};

}  // namespace actorserve::attention
