// One row's block-Hadamard rotation and its symmetric quantization to 8 bits. workers/kernels/quantized_linear.py does
// the same in torch, operation by operation, and both give equal bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "panels.h"
#include "simd.h"

namespace actorserve {
namespace {  // private to the file that includes this header

constexpr int64_t kRowMultiple = 32;        // floats: a scratch row is padded with zeros to a multiple of it
constexpr float kSmallestAmax = 0x1p-100f;  // a row with a smaller amax counts as zeros: 127 / amax stays finite
constexpr int32_t kInputOffset = 128;       // kernels take inputs as unsigned: -127..127 become 1..255

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The stages of `stride` and 2 * `stride` of all blocks, in one pass.
inline void two_stages(float* row, int64_t size, int64_t stride) {
  for (int64_t start = 0; start < size; start += 4 * stride) {
    for (int64_t at = start; at < start + stride; at += kLanes) {
      const Floats a = load(row + at), b = load(row + at + stride);
      const Floats c = load(row + at + 2 * stride), d = load(row + at + 3 * stride);
      const Floats ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
      store(row + at, ab + cd);
      store(row + at + stride, a_b + c_d);
      store(row + at + 2 * stride, ab - cd);
      store(row + at + 3 * stride, a_b - c_d);
    }
  }
}

inline void one_stage(float* row, int64_t size, int64_t stride) {
  for (int64_t start = 0; start < size; start += 2 * stride) {
    for (int64_t at = start; at < start + stride; at += kLanes) {
      const Floats a = load(row + at), b = load(row + at + stride);
      store(row + at, a + b);
      store(row + at + stride, a - b);
    }
  }
}

// The stages within one vector.
inline Floats first_stages(Floats values, int64_t block) {
  if (block > 1) values = butterfly<1>(values);
  if (block > 2) values = butterfly<2>(values);
  if (block > 4) values = butterfly<4>(values);
  if constexpr (kLanes == 16) {
    if (block > 8) values = butterfly<8>(values);
  }
  return values;
}

// The fast Walsh-Hadamard transform of each block, not normalised: strides 1, 2, 4, ... block / 2, in this order.
// `to` has room for round_up(size, kRowMultiple) floats; the floats beyond `size` become zeros.
inline void rotate_row(const float* from, int64_t size, int64_t block, float* to) {
  constexpr int64_t kFour = 4 * kLanes;
  int64_t stride = kLanes;  // a larger block divides `size`, so the stages meet whole blocks only
  if (block >= kFour) {             // four vectors are in registers for two more stages
    for (int64_t at = 0; at < size; at += kFour) {
      const Floats a = first_stages(load(from + at), kFour);
      const Floats b = first_stages(load(from + at + kLanes), kFour);
      const Floats c = first_stages(load(from + at + 2 * kLanes), kFour);
      const Floats d = first_stages(load(from + at + 3 * kLanes), kFour);
      const Floats ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
      store(to + at, ab + cd);
      store(to + at + kLanes, a_b + c_d);
      store(to + at + 2 * kLanes, ab - cd);
      store(to + at + 3 * kLanes, a_b - c_d);
    }
    stride = kFour;
  } else {
    const int64_t padded = round_up(size, kRowMultiple);
    std::copy_n(from, size, to);
    std::fill(to + size, to + padded, 0.0f);
    for (int64_t at = 0; at < padded; at += kLanes) store(to + at, first_stages(load(to + at), block));
  }
  for (; 2 * stride < block; stride *= 4) two_stages(to, size, stride);
  if (stride < block) one_stage(to, size, stride);
}

// Quantizes a rotated row of `padded` floats: scale = amax / 127, q = round(x * (127 / amax)), stored as q + 128.
// |x * (127 / amax)| exceeds 127 by two roundings at most, so q needs no clipping. A row with an infinity or a NaN
// (an overflow of the rotation included) gets scale NaN, and its outputs will be NaN.
// It is written as one row of a tile of `num_rows`; `to` is its first slice.
template <class Input>
float quantize_row(const float* row, int64_t padded, int64_t num_rows, Input* to) {
  Magnitudes magnitudes;
  for (int64_t at = 0; at < padded; at += kLanes) magnitudes.include(load(row + at));
  const float amax = std::bit_cast<float>(magnitudes.largest());
  const bool is_used = std::isfinite(amax) && amax >= kSmallestAmax;
  const Floats factor = all(is_used ? 127.0f / amax : 0.0f);
  for (int64_t at = 0; at < padded; at += kLanes) {
    const Floats values = is_used ? load(row + at) * factor : factor;
    store_rounded(values, kInputOffset, to + input_offset(num_rows, at));
  }
  if (!std::isfinite(amax)) return std::numeric_limits<float>::quiet_NaN();
  return is_used ? amax / 127.0f : 0.0f;
}

}  // namespace
}  // namespace actorserve
