// Dot products of a few rows of 8-bit inputs with a panel of 16 columns of weights, by AVX2.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "panels.h"

namespace actorserve {
namespace {  // private to the file that includes this header

// GCC 12 would first load all rows' inputs, and run out of registers for the sums.
inline void keep_in_register(__m256i& sums) { asm volatile("" : "+x"(sums)); }

// Products of 16 bits: `vpmaddubsw` would do twice as many at once, but two of 8 x 8 bits do not fit its 16-bit sums.
struct Int8Kernel {
  using Input = int16_t;
  static constexpr int kMaxRows = 6;

  // sums[row][column] of a tile of rows and the panel.
  template <int kRows>
  static void run(const Input* tile, const Panel& panel, int32_t* sums) {
    if constexpr (kRows <= 3) {
      run_quads<kRows, 4>(tile, panel.weights, panel.num_steps, sums);
    } else {  // half a panel's columns at a time: 12 of the 16 registers are sums
      run_quads<kRows, 2>(tile, panel.weights, panel.num_steps, sums);
      run_quads<kRows, 2>(tile, panel.weights + 32, panel.num_steps, sums + 8);
    }
  }

 private:
  // Computes some quads of four columns; each column's sum is in two lanes until the end.
  template <int kRows, int kQuads>
  static void run_quads(const Input* tile, const uint8_t* weights, int64_t num_steps, int32_t* sums) {
    __m256i totals[kRows][kQuads] = {};
    for (int64_t left = num_steps; left > 0; left -= kSliceInputs / 4, tile += kRows * kSliceInputs) {
      const Input* const end = tile + std::min<int64_t>(4 * left, kSliceInputs);
      for (const Input* x = tile; x < end; x += 4, weights += kStepBytes) {
        if constexpr (kQuads == 2) prefetch_weights<kRows>(weights);  // the CPU predicts whole panels itself
        __m256i columns[kQuads];
#pragma GCC unroll 4
        for (int quad = 0; quad < kQuads; ++quad) {
          columns[quad] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + quad * 16)));
        }
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          int64_t four;
          std::memcpy(&four, x + row * kSliceInputs, sizeof four);
          const __m256i inputs = _mm256_set1_epi64x(four);
#pragma GCC unroll 4
          for (int quad = 0; quad < kQuads; ++quad) {
            totals[row][quad] = _mm256_add_epi32(totals[row][quad], _mm256_madd_epi16(inputs, columns[quad]));
            keep_in_register(totals[row][quad]);
          }
        }
      }
    }
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
      for (int quad = 0; quad < kQuads; quad += 2) {
        const __m256i mixed = _mm256_hadd_epi32(totals[row][quad], totals[row][quad + 1]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + row * kPanelColumns + quad * 4),
                            _mm256_permute4x64_epi64(mixed, 0xD8));
      }
    }
  }
};

// Here `vpmaddubsw` is exact: a group's four sums of two products are within 4 * 2 * 255 * 8 = 16,320.
struct Int4Kernel {
  using Input = uint8_t;
  static constexpr int kMaxRows = 6;

  template <int kRows>
  static void run(const Input* tile, const Panel& panel, int32_t* sums) {
    const uint8_t* weights = panel.weights;
    const int8_t* scales = panel.group_scales;
    if constexpr (kRows <= 2) {
      run_halves<kRows, 2>(tile, weights, scales, panel.num_groups, sums);
    } else {
      run_halves<kRows, 1>(tile, weights, scales, panel.num_groups, sums);
      run_halves<kRows, 1>(tile, weights + 32, scales + 8, panel.num_groups, sums + 8);
    }
  }

 private:
  // One or both halves of eight columns.
  template <int kRows, int kHalves>
  static void run_halves(const Input* tile, const uint8_t* weights, const int8_t* scales, int64_t num_groups,
                         int32_t* sums) {
    const __m256i lower = _mm256_set1_epi8(0x0F);
    const __m256i signed_nibbles = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
    __m256i totals[kRows][kHalves] = {};
    for (int64_t group = 0; group < num_groups; ++group) {
      const Input* x = tile + input_offset(kRows, group * kGroupInputs);
      __m256i parts[kRows][kHalves] = {};
#pragma GCC unroll 2
      for (int pair = 0; pair < kGroupInputs / 8; ++pair) {
        const uint8_t* step = weights + group * kGroupBytes + pair * kStepBytes;
        prefetch_weights<kRows>(step);
        __m256i even[kHalves], odd[kHalves];
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half) {
          const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(step + half * 32));
          even[half] = _mm256_shuffle_epi8(signed_nibbles, _mm256_and_si256(bytes, lower));
          odd[half] = _mm256_shuffle_epi8(signed_nibbles, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), lower));
        }
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          const Input* eight = x + row * kSliceInputs + pair * 8;
          const __m256i first = broadcast_4(eight), second = broadcast_4(eight + 4);
#pragma GCC unroll 2
          for (int half = 0; half < kHalves; ++half) {
            __m256i& part = parts[row][half];
            part = _mm256_add_epi16(part, _mm256_maddubs_epi16(first, even[half]));
            part = _mm256_add_epi16(part, _mm256_maddubs_epi16(second, odd[half]));
            keep_in_register(part);
          }
        }
      }
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) {
        const __m256i scale = _mm256_cvtepi8_epi32(
            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales + group * kPanelColumns + half * 8)));
        const __m256i twice = _mm256_blend_epi16(scale, _mm256_slli_epi32(scale, 16), 0xAA);
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          totals[row][half] = _mm256_add_epi32(totals[row][half], _mm256_madd_epi16(parts[row][half], twice));
        }
      }
    }
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + row * kPanelColumns + half * 8), totals[row][half]);
      }
    }
  }

  static __m256i broadcast_4(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return _mm256_set1_epi32(four);
  }
};

}  // namespace
}  // namespace actorserve
