// Token-wise functions (workers/kernels/row_ops.py has their contracts). Each row is computed separately, in whole
// vectors and in one order of summing, so its bits depend neither on the number of rows nor on that of threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace actorserve {
namespace {

using at::Tensor;

constexpr int64_t kEight = kLanesOf<Eight>;
constexpr int64_t kSerialElements = 16384;  // fewer take less time than a second thread takes to wake

template <typename Function>
void for_rows(int64_t num_rows, int64_t row_elements, const Function& function) {
  const int64_t grain = std::max<int64_t>(1, kSerialElements / std::max<int64_t>(1, row_elements));
  parallel_for(num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) function(row);
  });
}

void check_floats(const Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.device().is_cpu(), name, " must be float32 on the CPU");
}

// x as a matrix [rows, last dimension], and a result of the same shape.
struct Rows {
  explicit Rows(const Tensor& x) : in(x.contiguous()) {
    check_floats(x, "x");
    TORCH_CHECK(x.dim() >= 1 && x.size(-1) > 0, "x must have elements in its last dimension");
    width = x.size(-1);
    count = x.numel() / width;
    out = at::empty(in.sizes(), in.options());
  }
  const float* source(int64_t row) const { return in.const_data_ptr<float>() + row * width; }
  float* target(int64_t row) const { return out.data_ptr<float>() + row * width; }

  Tensor in, out;
  int64_t width = 0, count = 0;
};

const float* parameter(const Tensor& tensor, int64_t width, const char* name) {
  check_floats(tensor, name);
  TORCH_CHECK(tensor.is_contiguous() && tensor.numel() == width, name, " must be ", width, " numbers");
  return tensor.const_data_ptr<float>();
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Rows rows(x);
  const int64_t width = rows.width;
  const float* w = parameter(weight, width, "weight");
  for_rows(rows.count, width, [&](int64_t row) {
    const float* from = rows.source(row);
    float* to = rows.target(row);
    Eight squares = {};
    for (int64_t i = 0; i < width; i += kEight) {
      const Eight lanes = load(from + i, width - i);
      squares += lanes * lanes;
    }
    const float scale = 1.0f / std::sqrt(sum_of_lanes(squares) / static_cast<float>(width) + static_cast<float>(eps));
    for (int64_t i = 0; i < width; ++i) to[i] = from[i] * scale * w[i];
  });
  return rows.out;
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const Rows rows(x);
  const int64_t width = rows.width;
  const float* w = parameter(weight, width, "weight");
  const float* b = parameter(bias, width, "bias");
  for_rows(rows.count, width, [&](int64_t row) {
    const float* from = rows.source(row);
    float* to = rows.target(row);
    Eight total = {};
    for (int64_t i = 0; i < width; i += kEight) total += load(from + i, width - i);
    const float mean = sum_of_lanes(total) / static_cast<float>(width);
    Eight squares = {};
    for (int64_t i = 0; i < width; i += kEight) {
      Eight lanes = load(from + i, width - i) - mean;
      for (int64_t beyond = width - i; beyond < kEight; ++beyond) lanes[beyond] = 0.0f;
      squares += lanes * lanes;
    }
    const float scale = 1.0f / std::sqrt(sum_of_lanes(squares) / static_cast<float>(width) + static_cast<float>(eps));
    for (int64_t i = 0; i < width; ++i) to[i] = (from[i] - mean) * scale * w[i] + b[i];
  });
  return rows.out;
}

Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check_floats(x, "x");
  TORCH_CHECK(x.dim() == 3 && x.size(2) % 2 == 0 && x.stride(2) == 1, "x must be [tokens, heads, even head_dim]");
  const int64_t tokens = x.size(0), heads = x.size(1), half = x.size(2) / 2;
  const float* cosines = parameter(cos, tokens * half, "cos");
  const float* sines = parameter(sin, tokens * half, "sin");
  Tensor out = at::empty({tokens, heads, 2 * half}, x.options());
  const float* source = x.const_data_ptr<float>();
  float* target = out.data_ptr<float>();
  for_rows(tokens, heads * 2 * half, [&](int64_t token) {
    const float* c = cosines + token * half;
    const float* s = sines + token * half;
    for (int64_t head = 0; head < heads; ++head) {
      const float* first = source + token * x.stride(0) + head * x.stride(1);
      const float* second = first + half;
      float* to = target + (token * heads + head) * 2 * half;
      for (int64_t i = 0; i < half; i += kEight) {
        const int64_t left = half - i;
        const Eight a = load(first + i, left), b = load(second + i, left);
        const Eight cosine = load(c + i, left), sine = load(s + i, left);
        store(to + i, a * cosine - b * sine, left);
        store(to + half + i, b * cosine + a * sine, left);
      }
    }
  });
  return out;
}

Eight silu(Eight x) { return x / (1.0f + exp(-x)); }

// tanh(y) = 1 - 2 / (e^2y + 1)
Eight gelu_tanh(Eight x) {
  const Eight inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (2.0f - 2.0f / (exp(2.0f * inner) + 1.0f));
}

Tensor gated(const Tensor& gate_up, bool is_silu) {
  check_floats(gate_up, "gate_up");
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0 && gate_up.is_contiguous(),
              "gate_up must be [rows, 2 * I]");
  const int64_t width = gate_up.size(1) / 2;
  Tensor out = at::empty({gate_up.size(0), width}, gate_up.options());
  const float* source = gate_up.const_data_ptr<float>();
  float* target = out.data_ptr<float>();
  for_rows(gate_up.size(0), width, [&](int64_t row) {
    const float* gate = source + row * 2 * width;
    const float* up = gate + width;
    float* to = target + row * width;
    for (int64_t i = 0; i < width; i += kEight) {
      const Eight lanes = load(gate + i, width - i);
      store(to + i, (is_silu ? silu(lanes) : gelu_tanh(lanes)) * load(up + i, width - i), width - i);
    }
  });
  return out;
}

Tensor softmax(const Tensor& x) {
  const Rows rows(x);
  const int64_t width = rows.width;
  for_rows(rows.count, width, [&](int64_t row) {
    const float* from = rows.source(row);
    float* to = rows.target(row);
    const float highest = *std::max_element(from, from + width);
    Eight total = {};
    for (int64_t i = 0; i < width; i += kEight) {
      Eight weights = exp(load(from + i, width - i) - highest);
      for (int64_t beyond = width - i; beyond < kEight; ++beyond) weights[beyond] = 0.0f;
      store(to + i, weights, width - i);
      total += weights;
    }
    const float divisor = sum_of_lanes(total);
    for (int64_t i = 0; i < width; ++i) to[i] /= divisor;
  });
  return rows.out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(actorserve, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", &rms_norm);
  m.def("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor", &layer_norm);
  m.def("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor", &rotate);
  m.def("gated(Tensor gate_up, bool is_silu) -> Tensor", &gated);
  m.def("softmax(Tensor x) -> Tensor", &softmax);
}

}  // namespace actorserve
