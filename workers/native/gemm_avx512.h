// Dot products of a few rows of 8-bit inputs with a panel of 16 columns of weights, by AVX-512 VNNI.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "panels.h"

namespace actorserve {
namespace {  // private to the file that includes this header

inline __m512i broadcast_4(const uint8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm512_set1_epi32(four);
}

struct Int8Kernel {
  using Input = uint8_t;
  static constexpr int kMaxRows = 16;

  // sums[row][column] of a tile of rows and the panel.
  template <int kRows>
  static void run(const Input* tile, const Panel& panel, int32_t* sums) {
    // Few sums would wait for their last addition, so each is split into several, for every second or fourth step.
    constexpr int kChains = kRows >= 8 ? 1 : kRows >= 4 ? 2 : 4;
    __m512i totals[kChains][kRows] = {};
    const uint8_t* weights = panel.weights;
    const auto add_step = [&](const Input* x, auto& total) {
      prefetch_weights<kRows>(weights);
      const __m512i columns = _mm512_loadu_si512(weights);
      weights += kStepBytes;
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        total[row] = _mm512_dpbusd_epi32(total[row], broadcast_4(x + row * kSliceInputs), columns);
      }
    };
    for (int64_t left = panel.num_steps; left > 0; left -= kSliceInputs / 4, tile += kRows * kSliceInputs) {
      const int64_t num_steps = std::min<int64_t>(left, kSliceInputs / 4);
      int64_t step = 0;
      for (; step + kChains <= num_steps; step += kChains) {
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; ++chain) add_step(tile + (step + chain) * 4, totals[chain]);
      }
      for (; step < num_steps; ++step) add_step(tile + step * 4, totals[0]);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      __m512i total = totals[0][row];
#pragma GCC unroll 4
      for (int chain = 1; chain < kChains; ++chain) total = _mm512_add_epi32(total, totals[chain][row]);
      _mm512_storeu_si512(sums + row * kPanelColumns, total);
    }
  }
};

struct Int4Kernel {
  using Input = uint8_t;
  static constexpr int kMaxRows = 12;

  // A nibble lies in the upper half of its byte, so it counts 16 times until its group's sum is shifted back.
  template <int kRows>
  static void run(const Input* tile, const Panel& panel, int32_t* sums) {
    const __m512i upper = _mm512_set1_epi8(static_cast<char>(0xF0));
    __m512i totals[kRows] = {};
    for (int64_t group = 0; group < panel.num_groups; ++group) {
      const Input* x = tile + input_offset(kRows, group * kGroupInputs);
      __m512i parts[kRows] = {};
#pragma GCC unroll 2
      for (int pair = 0; pair < kGroupInputs / 8; ++pair) {
        const uint8_t* weights = panel.weights + group * kGroupBytes + pair * kStepBytes;
        prefetch_weights<kRows>(weights);
        const __m512i bytes = _mm512_loadu_si512(weights);
        const __m512i even = _mm512_and_si512(_mm512_slli_epi16(bytes, 4), upper);
        const __m512i odd = _mm512_and_si512(bytes, upper);
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) {
          const Input* eight = x + row * kSliceInputs + pair * 8;
          parts[row] = _mm512_dpbusd_epi32(parts[row], broadcast_4(eight), even);
          parts[row] = _mm512_dpbusd_epi32(parts[row], broadcast_4(eight + 4), odd);
        }
      }
      const __m512i scale = _mm512_cvtepi8_epi32(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(panel.group_scales + group * kPanelColumns)));
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        totals[row] = _mm512_add_epi32(totals[row], _mm512_mullo_epi32(_mm512_srai_epi32(parts[row], 4), scale));
      }
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) _mm512_storeu_si512(sums + row * kPanelColumns, totals[row]);
  }
};

}  // namespace
}  // namespace actorserve
