// Linear layers of 8-bit inputs and 8- or 4-bit weights: rotate, quantize, multiply in int32, scale; in one call.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "panels.h"
#include "quantize.h"
#include "threads.h"

#if defined(__AMX_INT8__)
#include "gemm_amx.h"
#elif defined(__AVX512VNNI__)
#include "gemm_avx512.h"
#else
#include "gemm_avx2.h"
#endif

namespace actorserve {
namespace {

using at::Tensor;

#if defined(__AMX_INT8__)
using Int8 = Int8AmxKernel;
#else
using Int8 = ByRows<Int8Kernel>;
#endif
using Int4 = ByRows<Int4Kernel>;

constexpr int64_t kMinProducts = 1 << 16;  // per thread: fewer take less time than a second thread takes to wake
constexpr int64_t kMinFloats = 1 << 13;    // per thread, to rotate and quantize

struct Epilogue {
  const int32_t* column_sums;  // 128 times the weights' sum: what the inputs' offset adds to a dot product
  const float* column_scales;
  const float* bias;      // or null
  const float* residual;  // or null
  const float* row_scales;
  float* y;
  int64_t out_features;

  // Prefetches the memory that `write` will write, while the products are computed.
  void expect(int64_t first_row, int64_t num_rows, int64_t first_column) const {
    for (int64_t row = first_row; row < first_row + num_rows; ++row) {
      __builtin_prefetch(y + row * out_features + first_column, 1);
    }
  }

  // `sums` is [num_rows][a panel's columns], which may go beyond the last one.
  void write(const int32_t* sums, int64_t first_row, int64_t num_rows, int64_t first_column) const {
    const int64_t num_columns = std::min<int64_t>(kPanelColumns, out_features - first_column);
    for (int64_t row = 0; row < num_rows; ++row) {
      if (num_columns == kPanelColumns) {  // the compiler unrolls this one
        write_row(sums + row * kPanelColumns, first_row + row, first_column, kPanelColumns);
      } else {
        write_row(sums + row * kPanelColumns, first_row + row, first_column, num_columns);
      }
    }
  }

 private:
  [[gnu::always_inline]] void write_row(const int32_t* sums, int64_t row, int64_t first_column,
                                        int64_t num_columns) const {
    const int64_t start = row * out_features + first_column;
    const float row_scale = row_scales[row];
    float out[kPanelColumns];
    for (int64_t column = 0; column < num_columns; ++column) {
      // Unsigned: a sum beyond 32 bits wraps, and wraps back when the offset's part is subtracted.
      const auto sum = static_cast<int32_t>(static_cast<uint32_t>(sums[column]) -
                                            static_cast<uint32_t>(column_sums[first_column + column]));
      out[column] = (static_cast<float>(sum) * row_scale) * column_scales[first_column + column];
    }
    if (bias != nullptr) {
      for (int64_t column = 0; column < num_columns; ++column) out[column] += bias[first_column + column];
    }
    if (residual != nullptr) {
      for (int64_t column = 0; column < num_columns; ++column) out[column] += residual[start + column];
    }
    std::copy_n(out, num_columns, y + start);
  }
};

struct Weights {
  const uint8_t* packed;       // panel after panel
  const int8_t* group_scales;  // likewise; null: int8
  int64_t panel_bytes;
  int64_t num_groups;  // of a panel

  Panel operator[](int64_t panel) const {
    const int8_t* scales = group_scales == nullptr ? nullptr : group_scales + panel * num_groups * kPanelColumns;
    return {packed + panel * panel_bytes, scales, panel_bytes / kStepBytes, num_groups};
  }
};

// A row of this thread's own memory, which is kept between calls.
float* scratch_row(int64_t size) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(static_cast<size_t>(size));
  return memory.data();
}

template <class Kernel>
void multiply(const float* x, int64_t num_rows, int64_t in_features, int64_t block, const Weights& weights,
              Epilogue epilogue) {
  using Input = typename Kernel::Input;
  const int64_t padded = round_up(in_features, kRowMultiple), stride = round_up(padded, kSliceInputs);
  const int64_t num_inputs = num_rows * stride + Kernel::kSlackInputs;
  const Tensor inputs = at::empty({num_inputs * static_cast<int64_t>(sizeof(Input))}, at::kByte);
  const Tensor scales = at::empty({num_rows}, at::kFloat);
  auto* quantized = reinterpret_cast<Input*>(inputs.mutable_data_ptr<uint8_t>());
  auto* row_scales = scales.mutable_data_ptr<float>();
  epilogue.row_scales = row_scales;
  const int64_t num_tiles = (num_rows + Kernel::kMaxRows - 1) / Kernel::kMaxRows;
  const auto first_row = [&](int64_t tile) { return num_rows * tile / num_tiles; };

  parallel_for(num_rows, std::max<int64_t>(1, kMinFloats / padded), [&](int64_t begin, int64_t end) {
    float* scratch = scratch_row(padded);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t tile = ((row + 1) * num_tiles - 1) / num_rows, first = first_row(tile);
      Input* to = quantized + first * stride + (row - first) * kSliceInputs;
      rotate_row(x + row * in_features, in_features, block, scratch);
      row_scales[row] = quantize_row(scratch, padded, first_row(tile + 1) - first, to);
    }
  });

  // Weights are read from memory once: a panel stays in the core's own cache for all rows.
  const int64_t num_panels = (epilogue.out_features + kPanelColumns - 1) / kPanelColumns;
  const int64_t products = std::max<int64_t>(1, num_rows * padded * kPanelColumns);
  parallel_for(num_panels, std::max<int64_t>(1, kMinProducts / products), [&](int64_t begin, int64_t end) {
    constexpr int64_t kNumSums = Kernel::kMaxRows * kPanelColumns;
    alignas(64) int32_t sums[Kernel::kPanels * kNumSums];
    [[maybe_unused]] const typename Kernel::Session session;
    for (int64_t first = begin, count; first < end; first += count) {
      count = std::min<int64_t>(Kernel::kPanels, end - first);
      Panel panels[Kernel::kPanels];
      for (int64_t panel = 0; panel < count; ++panel) panels[panel] = weights[first + panel];
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t row = first_row(tile), rows = first_row(tile + 1) - row;
        for (int64_t panel = 0; panel < count; ++panel) epilogue.expect(row, rows, (first + panel) * kPanelColumns);
        Kernel::run(quantized + row * stride, rows, panels, count, sums);
        for (int64_t panel = 0; panel < count; ++panel) {
          epilogue.write(sums + panel * kNumSums, row, rows, (first + panel) * kPanelColumns);
        }
      }
    }
  });
}

void check(const Tensor& tensor, at::ScalarType type, at::IntArrayRef sizes, const char* name) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == type && tensor.is_contiguous() &&
                  tensor.sizes() == sizes,
              name, " must be a contiguous ", type, " tensor of shape ", sizes, ", not ", tensor.scalar_type(), " ",
              tensor.sizes());
}

const float* optional_floats(const std::optional<Tensor>& tensor, at::IntArrayRef sizes, const char* name) {
  if (!tensor.has_value()) return nullptr;
  check(*tensor, at::kFloat, sizes, name);
  return tensor->const_data_ptr<float>();
}

void check_block(int64_t block, int64_t in_features) {
  TORCH_CHECK(block > 0 && std::has_single_bit(static_cast<uint64_t>(block)) && in_features % block == 0,
              "block ", block, " must be a power of two that divides ", in_features);
}

Tensor quantized_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& group_scales,
                        const Tensor& column_scales, const Tensor& column_sums, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& residual, int64_t block) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "x must be [rows, in_features], not ", x.sizes());
  const Tensor input = x.contiguous();
  const int64_t num_rows = x.size(0), in_features = x.size(1), out_features = column_scales.numel();
  const int64_t num_panels = (out_features + kPanelColumns - 1) / kPanelColumns;
  const bool is_int4 = group_scales.has_value();
  const int64_t num_groups = (in_features + kGroupInputs - 1) / kGroupInputs;
  const int64_t panel_bytes = is_int4 ? num_groups * kGroupBytes : round_up(in_features, 4) * kPanelColumns;
  check(input, at::kFloat, {num_rows, in_features}, "x");
  check(packed, at::kChar, {num_panels * panel_bytes}, "packed");
  check(column_scales, at::kFloat, {out_features}, "column_scales");
  check(column_sums, at::kInt, {out_features}, "column_sums");
  if (is_int4) check(*group_scales, at::kChar, {num_panels * num_groups * kPanelColumns}, "group_scales");
  check_block(block, in_features);

  Tensor y = at::empty({num_rows, out_features}, at::kFloat);
  const Epilogue epilogue{
      .column_sums = column_sums.const_data_ptr<int32_t>(),
      .column_scales = column_scales.const_data_ptr<float>(),
      .bias = optional_floats(bias, {out_features}, "bias"),
      .residual = optional_floats(residual, {num_rows, out_features}, "residual"),
      .row_scales = nullptr,
      .y = y.mutable_data_ptr<float>(),
      .out_features = out_features,
  };
  const Weights weights{
      .packed = reinterpret_cast<const uint8_t*>(packed.const_data_ptr<int8_t>()),
      .group_scales = is_int4 ? group_scales->const_data_ptr<int8_t>() : nullptr,
      .panel_bytes = panel_bytes,
      .num_groups = num_groups,
  };
  const auto run = is_int4 ? multiply<Int4> : multiply<Int8>;
  run(input.const_data_ptr<float>(), num_rows, in_features, block, weights, epilogue);
  return y;
}

Tensor rotate_rows(const Tensor& x, int64_t block) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "x must be [rows, in_features], not ", x.sizes());
  const int64_t num_rows = x.size(0), in_features = x.size(1), padded = round_up(in_features, kRowMultiple);
  check(x, at::kFloat, {num_rows, in_features}, "x");
  check_block(block, in_features);
  Tensor y = at::empty({num_rows, in_features}, at::kFloat);
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  parallel_for(num_rows, std::max<int64_t>(1, kMinFloats / padded), [&](int64_t begin, int64_t end) {
    float* row = scratch_row(padded);
    for (int64_t at = begin; at < end; ++at) {
      rotate_row(from + at * in_features, in_features, block, row);
      std::copy_n(row, in_features, to + at * in_features);
    }
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(actorserve, m) {
  m.def(
      "quantized_linear(Tensor x, Tensor packed, Tensor? group_scales, Tensor column_scales, Tensor column_sums, "
      "Tensor? bias, Tensor? residual, int block) -> Tensor",
      &quantized_linear);
  m.def("rotate_rows(Tensor x, int block) -> Tensor", &rotate_rows);
}

}  // namespace actorserve
