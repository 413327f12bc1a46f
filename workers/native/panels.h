// The layout of quantized weights, the same for every instruction set. workers/kernels/quantized_linear.py packs them.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <utility>

namespace actorserve {
namespace {  // private to the file that includes this header

constexpr int kPanelColumns = 16;
constexpr int kStepBytes = 4 * kPanelColumns;                  // int8: four inputs of a panel's columns
constexpr int kGroupInputs = 16;                               // int4: inputs that share a group scale
constexpr int kGroupBytes = kPanelColumns * kGroupInputs / 2;  // of nibbles

constexpr int64_t kSliceInputs = 64;

// Quantized rows are in tiles, which meet a panel together: [in_features / 64 slices][rows of the tile][64 inputs].
// So a tile is read from its start to its end, and its rows' distances are known to the compiler.
constexpr int64_t input_offset(int64_t num_rows, int64_t input) {
  return input / kSliceInputs * num_rows * kSliceInputs + input % kSliceInputs;
}

// Panels follow one another in memory. With few rows the next panels are prefetched into the first cache, because they
// are needed soon. With many rows they go into the second cache, so that they do not evict the rows from the first.
template <int kRows>
void prefetch_weights(const uint8_t* in_use) {
  constexpr int64_t kBytesAhead = 8192;
  _mm_prefetch(reinterpret_cast<const char*>(in_use) + kBytesAhead, kRows < 4 ? _MM_HINT_T0 : _MM_HINT_T1);
}

// One panel. int8: [in_features / 4 steps][16 columns][4 inputs] signed bytes.
// int4: [in_features / 8][16 columns][4 inputs] bytes, each the signed nibbles of inputs i (lower) and i + 4 (upper) of
// its eight; group_scales is [in_features / 16 groups][16 columns] signed bytes.
struct Panel {
  const uint8_t* weights;
  const int8_t* group_scales;  // null: int8
  int64_t num_steps;
  int64_t num_groups;
};

// A kernel that meets one panel at a time, and is compiled for each number of rows.
template <class Kernel>
struct ByRows {
  using Input = typename Kernel::Input;
  static constexpr int kMaxRows = Kernel::kMaxRows;
  static constexpr int kPanels = 1;
  static constexpr int64_t kSlackInputs = 0;
  struct Session {};  // what a thread holds while it multiplies

  static void run(const Input* tile, int64_t num_rows, const Panel* panels, int64_t, int32_t* sums) {
    static constexpr auto kRun = kernels(std::make_integer_sequence<int, kMaxRows>());
    kRun[static_cast<size_t>(num_rows - 1)](tile, panels[0], sums);
  }

 private:
  template <int... kRows>
  static constexpr auto kernels(std::integer_sequence<int, kRows...>) {
    return std::array{&Kernel::template run<kRows + 1>...};
  }
};

}  // namespace
}  // namespace actorserve
