// Causal attention directly on the paged KV pool (workers/attention/native.py), for CPUs.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <optional>
#include <type_traits>
#include <vector>

#include "attention_unit.h"
#include "threads.h"

namespace actorserve::attention {
namespace {

using at::Tensor;

constexpr int64_t kMaxRows = 96;                 // of a unit: its scores and sums stay in the core's own cache
constexpr int64_t kSerialNumbers = 1 << 16;      // KV numbers; fewer take less time than a second thread takes to wake
constexpr int64_t kMaxPartialNumbers = 4 << 20;  // of partitions that are computed separately
constexpr int64_t kNoWindow = int64_t{1} << 40;

// A unit and a KV head, with all partitions or with one.
struct Item {
  int64_t unit, kv_head, partition;
  int64_t partial;  // the place of a single partition's result

  bool follows(const Item& first) const { return unit == first.unit && kv_head == first.kv_head; }
};

struct Plan {
  std::vector<Unit> units;
  std::vector<Item> items;
  int64_t num_partial_numbers = 0;  // 0: every item has all partitions
  int64_t num_kv_numbers = 0;       // how many the call reads, roughly
};

std::vector<Unit> units_of(const Tensor& query_starts, const Tensor& context_lens, const Tensor& block_tables,
                           int64_t tokens_per_block, int64_t num_blocks, int64_t num_tokens, int64_t heads_per_group) {
  const int64_t num_requests = context_lens.size(0), max_blocks = block_tables.size(1);
  const int64_t queries_per_unit = std::max<int64_t>(1, kMaxRows / heads_per_group);
  const int32_t* starts = query_starts.const_data_ptr<int32_t>();
  const int32_t* contexts = context_lens.const_data_ptr<int32_t>();
  const int32_t* tables = block_tables.const_data_ptr<int32_t>();
  TORCH_CHECK(starts[0] == 0 && starts[num_requests] == num_tokens, "query_starts must go from 0 to the last token");
  std::vector<Unit> units;
  for (int64_t request = 0; request < num_requests; ++request) {
    const int64_t num_queries = int64_t{starts[request + 1]} - starts[request], context = contexts[request];
    const int32_t* blocks = tables + request * max_blocks;
    const int64_t used = (context + tokens_per_block - 1) / tokens_per_block;
    TORCH_CHECK(num_queries >= 0 && num_queries <= context && used <= max_blocks, "request ", request, ": ",
                num_queries, " queries, ", context, " tokens and ", max_blocks, " blocks do not fit together");
    for (int64_t i = 0; i < used; ++i) {
      TORCH_CHECK(blocks[i] >= 0 && blocks[i] < num_blocks, "block ", blocks[i], " is outside the pool");
    }
    for (int64_t first = 0; first < num_queries; first += queries_per_unit) {
      units.push_back({blocks, starts[request] + first, context - num_queries + first,
                       std::min(queries_per_unit, num_queries - first)});
    }
  }
  return units;
}

// Partitions are computed separately if there are too few units for the threads. The bits are the same.
template <typename T>
Plan plan_of(std::vector<Unit> units, const Call<T>& call, int64_t num_kv_heads) {
  Plan plan;
  int64_t apart = 0;
  for (const Unit& unit : units) {
    const int64_t num_partitions = unit.end_partition() - unit.first_partition(call.window);
    apart += num_kv_heads * num_partitions * Partial::size(unit.num_queries * call.heads_per_group, call.padded_dim());
    plan.num_kv_numbers += 2 * num_kv_heads * (unit.end() - unit.begin(call.window)) * call.head_dim;
  }
  const int64_t threads = num_threads(), num_items = static_cast<int64_t>(units.size()) * num_kv_heads;
  const bool few = threads > 1 && num_items < 4 * threads;
  const bool split = few && apart <= kMaxPartialNumbers && plan.num_kv_numbers > kSerialNumbers;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
      const int64_t first = units[unit].first_partition(call.window);
      const int64_t last = split ? units[unit].end_partition() : first + 1;
      for (int64_t partition = first; partition < last; ++partition) {
        plan.items.push_back({static_cast<int64_t>(unit), kv_head, partition, plan.num_partial_numbers});
        if (split) {
          plan.num_partial_numbers += Partial::size(units[unit].num_queries * call.heads_per_group, call.padded_dim());
        }
      }
    }
  }
  plan.units = std::move(units);
  return plan;
}

// Each free thread takes the next item. The last items come first, because they are the longest of a prompt.
template <typename Function>
void for_items(const Plan& plan, const Function& function) {
  const int64_t count = static_cast<int64_t>(plan.items.size());
  if (plan.num_kv_numbers <= kSerialNumbers) {
    for (const Item& item : plan.items) function(item);
    return;
  }
  std::atomic<int64_t> taken = 0;
  parallel_for(std::min<int64_t>(count, num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i = taken++; i < count; i = taken++) function(plan.items[static_cast<size_t>(count - 1 - i)]);
  });
}

// A thread's memory for tiles, kept between calls.
std::vector<float>& memory_of_this_thread() {
  thread_local std::vector<float> memory;
  return memory;
}

template <typename T>
void attend(const Plan& plan, const Call<T>& call) {
  if (plan.num_partial_numbers == 0) {
    for_items(plan, [&](const Item& item) {
      UnitWork<T>(call, plan.units[static_cast<size_t>(item.unit)], item.kv_head, memory_of_this_thread()).run();
    });
    return;
  }
  const Tensor partials = at::empty({plan.num_partial_numbers}, at::kFloat);
  float* numbers = partials.data_ptr<float>();
  const auto partial_of = [&](const Item& item) {
    const Unit& unit = plan.units[static_cast<size_t>(item.unit)];
    return Partial(numbers + item.partial, unit.num_queries * call.heads_per_group, call.padded_dim());
  };
  for_items(plan, [&](const Item& item) {
    UnitWork<T>(call, plan.units[static_cast<size_t>(item.unit)], item.kv_head, memory_of_this_thread())
        .attend(item.partition, partial_of(item));
  });
  // Merges the other partitions of a unit into its first one.
  for (size_t next = 0; next < plan.items.size();) {
    const Item& first = plan.items[next++];
    UnitWork<T> work(call, plan.units[static_cast<size_t>(first.unit)], first.kv_head, memory_of_this_thread());
    for (; next < plan.items.size() && plan.items[next].follows(first); ++next) {
      work.merge(plan.items[next].partition, partial_of(plan.items[next]), partial_of(first));
    }
    work.write(partial_of(first));
  }
}

template <typename T>
const T* numbers_of(const Tensor& pool) {
  if constexpr (std::is_same_v<T, float>) return pool.const_data_ptr<float>();
  else return reinterpret_cast<const uint16_t*>(pool.const_data_ptr<at::BFloat16>());
}

void check_integers(const Tensor& tensor, int64_t num_dims, const char* name) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == at::kInt && tensor.dim() == num_dims &&
                  tensor.is_contiguous(),
              name, " must be int32 on the CPU, contiguous, with ", num_dims, " dimensions");
}

Tensor paged_attention(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& query_starts,
                       const Tensor& context_lens, const Tensor& block_tables, double scale,
                       std::optional<int64_t> window) {
  TORCH_CHECK(query.device().is_cpu() && query.scalar_type() == at::kFloat && query.dim() == 3 && query.stride(2) == 1,
              "query must be float32 [T, num_heads, head_dim] on the CPU");
  const int64_t num_tokens = query.size(0), num_heads = query.size(1), head_dim = query.size(2);
  TORCH_CHECK(keys.device().is_cpu() && values.device().is_cpu() && keys.scalar_type() == values.scalar_type() &&
                  (keys.scalar_type() == at::kFloat || keys.scalar_type() == at::kBFloat16),
              "keys and values must both be float32 or bfloat16 on the CPU");
  TORCH_CHECK(head_dim > 0 && head_dim % 2 == 0 && head_dim <= kMaxHeadDim, "head_dim must be even, up to ",
              kMaxHeadDim, ": ", head_dim);
  const int64_t per_word = keys.scalar_type() == at::kFloat ? 1 : 2;
  TORCH_CHECK(keys.dim() == 5 && keys.size(2) == head_dim / per_word && keys.size(4) == per_word &&
                  keys.stride(4) == 1 && keys.stride(3) == per_word && keys.stride(2) == keys.size(3) * per_word,
              "keys must be [num_kv_heads, num_blocks, head_dim / ", per_word, ", tokens_per_block, ", per_word,
              "], to fit query ", query.sizes(), ", not ", keys.sizes());
  const int64_t num_kv_heads = keys.size(0), num_blocks = keys.size(1), tokens_per_block = keys.size(3);
  TORCH_CHECK(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0 && tokens_per_block > 0 && values.dim() == 3 &&
                  values.size(0) == num_kv_heads && values.size(1) == num_blocks * tokens_per_block &&
                  values.size(2) == head_dim && values.stride(2) == 1,
              "values must be [num_kv_heads, num_slots, head_dim], to fit query ", query.sizes(), " and keys ",
              keys.sizes(), ", not ", values.sizes());
  TORCH_CHECK(window.value_or(1) > 0, "window must be positive");
  check_integers(query_starts, 1, "query_starts");
  check_integers(context_lens, 1, "context_lens");
  check_integers(block_tables, 2, "block_tables");
  const int64_t num_requests = context_lens.size(0);
  TORCH_CHECK(query_starts.size(0) == num_requests + 1 && block_tables.size(0) == num_requests,
              "query_starts, context_lens and block_tables must be of the same requests");

  Tensor out = at::empty(query.sizes(), query.options());
  std::vector<Unit> units = units_of(query_starts, context_lens, block_tables, tokens_per_block,
                                     num_blocks, num_tokens, num_heads / num_kv_heads);
  const auto with = [&]<typename T>(T) {
    const Call<T> call{
        .query = query.const_data_ptr<float>(),
        .query_token_stride = query.stride(0),
        .query_head_stride = query.stride(1),
        .keys = numbers_of<T>(keys),
        .values = numbers_of<T>(values),
        .key_head_stride = keys.stride(0),
        .key_block_stride = keys.stride(1),
        .value_head_stride = values.stride(0),
        .value_slot_stride = values.stride(1),
        .out = out.data_ptr<float>(),
        .num_heads = num_heads,
        .heads_per_group = num_heads / num_kv_heads,
        .head_dim = head_dim,
        .tokens_per_block = tokens_per_block,
        .window = std::min(window.value_or(kNoWindow), kNoWindow),
        .scale = static_cast<float>(scale),
    };
    attend(plan_of(std::move(units), call, num_kv_heads), call);
  };
  if (keys.scalar_type() == at::kFloat) with(float{});
  else with(uint16_t{});
  return out;
}

TORCH_LIBRARY_FRAGMENT(actorserve, m) {
  m.def(
      "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor query_starts, Tensor context_lens, "
      "Tensor block_tables, float scale, int? window) -> Tensor",
      &paged_attention);
}

}  // namespace
}  // namespace actorserve::attention
