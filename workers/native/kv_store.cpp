// Stores a step's keys and values in their slots of the KV pool (workers/kv/cache.py).

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "threads.h"

namespace actorserve {
namespace {

using at::Tensor;

constexpr int64_t kSerialNumbers = 16384;  // fewer take less time than a second thread takes to wake

// Rounds to nearest, ties to even; NaN stays NaN.
uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

template <typename From, typename To>
void convert(const From* from, int64_t count, To* to) {
  if constexpr (std::is_same_v<From, To>) std::copy_n(from, count, to);
  else for (int64_t i = 0; i < count; ++i) to[i] = to_bfloat16(from[i]);
}

// Calls function(token, head) for all, on all threads.
template <typename Function>
void for_rows(const Tensor& rows, const Function& function) {
  const int64_t num_heads = rows.size(1);
  const int64_t grain = std::max<int64_t>(1, kSerialNumbers / std::max<int64_t>(1, num_heads * rows.size(2)));
  parallel_for(rows.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t head = 0; head < num_heads; ++head) {
      for (int64_t token = begin; token < end; ++token) function(token, head);
    }
  });
}

// Words of 32 bits; the distance between two is the number of tokens in a block.
template <typename From, typename To>
void store_keys(const Tensor& pool, const int64_t* slots, const Tensor& rows) {
  constexpr int64_t per_word = sizeof(uint32_t) / sizeof(To);
  const int64_t head_dim = rows.size(2), num_words = pool.size(2), per_block = pool.size(3);
  const From* from = static_cast<const From*>(rows.const_data_ptr());
  To* to = static_cast<To*>(pool.data_ptr());
  for_rows(rows, [&](int64_t token, int64_t head) {
    thread_local std::vector<To> row;
    row.resize(static_cast<size_t>(head_dim));
    convert(from + token * rows.stride(0) + head * rows.stride(1), head_dim, row.data());
    const int64_t block = slots[token] / per_block, offset = slots[token] % per_block;
    To* target = to + head * pool.stride(0) + block * pool.stride(1) + offset * per_word;
    for (int64_t word = 0; word < num_words; ++word) {
      std::memcpy(target + word * per_block * per_word, row.data() + word * per_word, sizeof(uint32_t));
    }
  });
}

template <typename From, typename To>
void store_values(const Tensor& pool, const int64_t* slots, const Tensor& rows) {
  const From* from = static_cast<const From*>(rows.const_data_ptr());
  To* to = static_cast<To*>(pool.data_ptr());
  for_rows(rows, [&](int64_t token, int64_t head) {
    convert(from + token * rows.stride(0) + head * rows.stride(1), rows.size(2),
            to + head * pool.stride(0) + slots[token] * pool.stride(1));
  });
}

template <typename From, typename To>
void store(const Tensor& key_pool, const Tensor& value_pool, const Tensor& slots, const Tensor& keys,
           const Tensor& values) {
  store_keys<From, To>(key_pool, slots.const_data_ptr<int64_t>(), keys);
  store_values<From, To>(value_pool, slots.const_data_ptr<int64_t>(), values);
}

void store_kv(const Tensor& key_pool, const Tensor& value_pool, const Tensor& slots, const Tensor& keys,
              const Tensor& values) {
  for (const Tensor& tensor : {key_pool, value_pool, slots, keys, values}) {
    TORCH_CHECK(tensor.device().is_cpu(), "keys, values, slots and pools must be on the CPU");
  }
  const auto pool_type = value_pool.scalar_type(), type = keys.scalar_type();
  const bool narrow = pool_type == at::kBFloat16, wide = pool_type == at::kFloat;
  TORCH_CHECK((narrow || wide) && (type == at::kFloat || (type == at::kBFloat16 && narrow)) &&
                  key_pool.scalar_type() == pool_type && values.scalar_type() == type,
              "cannot store ", type, " and ", values.scalar_type(), " into pools of ", key_pool.scalar_type(), " and ",
              pool_type);
  TORCH_CHECK(keys.dim() == 3 && keys.stride(2) == 1 && values.sizes() == keys.sizes() && values.stride(2) == 1,
              "keys and values must be [T, num_kv_heads, head_dim]");
  const int64_t num_tokens = keys.size(0), num_heads = keys.size(1), head_dim = keys.size(2);
  const int64_t per_word = narrow ? 2 : 1;
  TORCH_CHECK(value_pool.dim() == 3 && value_pool.size(0) == num_heads && value_pool.size(2) == head_dim &&
                  value_pool.stride(2) == 1,
              "the pool of values must be [num_kv_heads, num_slots, head_dim], to fit ", values.sizes());
  const int64_t num_slots = value_pool.size(1);
  TORCH_CHECK(key_pool.dim() == 5 && key_pool.size(0) == num_heads &&
                  key_pool.size(1) * key_pool.size(3) == num_slots && key_pool.size(2) * per_word == head_dim &&
                  key_pool.size(4) == per_word && key_pool.stride(4) == 1 && key_pool.stride(3) == per_word &&
                  key_pool.stride(2) == key_pool.size(3) * per_word,
              "the pool of keys must be [num_kv_heads, num_blocks, head_dim / ", per_word, ", tokens_per_block, ",
              per_word, "], to fit ", keys.sizes());
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.dim() == 1 && slots.is_contiguous() &&
                  slots.size(0) == num_tokens,
              "slots must be int64 [T]");
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t slot = slots.const_data_ptr<int64_t>()[i];
    TORCH_CHECK(slot >= 0 && slot < num_slots, "slot ", slot, " is outside the pool");
  }
  if (wide) store<float, float>(key_pool, value_pool, slots, keys, values);
  else if (type == at::kFloat) store<float, uint16_t>(key_pool, value_pool, slots, keys, values);
  else store<uint16_t, uint16_t>(key_pool, value_pool, slots, keys, values);
}

TORCH_LIBRARY_FRAGMENT(actorserve, m) {
  m.def("store_kv(Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor slots, Tensor keys, Tensor values) -> ()",
        &store_kv);
}

}  // namespace
}  // namespace actorserve
