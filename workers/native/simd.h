// The few operations on vectors of floats that the row kernels share, for both instruction sets.
#pragma once

#include <immintrin.h>

#include <cstdint>

#if !defined(__AVX512VNNI__) && !defined(__AVX2__)
#error "build with AVX-512 VNNI or AVX2"
#endif

namespace actorserve {
namespace {  // of the one file that includes this: nothing here is exported

#if defined(__AVX512VNNI__)

struct Floats {
  static constexpr int64_t kLanes = 16;
  __m512 lanes;

  static Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static Floats all(float value) { return {_mm512_set1_ps(value)}; }
  void store(float* to) const { _mm512_storeu_ps(to, lanes); }
  Floats operator+(Floats other) const { return {_mm512_add_ps(lanes, other.lanes)}; }
  Floats operator-(Floats other) const { return {_mm512_sub_ps(lanes, other.lanes)}; }
  Floats operator*(Floats other) const { return {_mm512_mul_ps(lanes, other.lanes)}; }

  // Lanes that are kStride apart become their sum and their difference.
  template <int kStride>
  Floats butterfly() const {
    static_assert(kStride == 1 || kStride == 2 || kStride == 4 || kStride == 8);
    __m512 partner;
    __mmask16 upper;
    if constexpr (kStride == 1) partner = _mm512_permute_ps(lanes, 0xB1), upper = 0xAAAA;
    if constexpr (kStride == 2) partner = _mm512_permute_ps(lanes, 0x4E), upper = 0xCCCC;
    if constexpr (kStride == 4) partner = _mm512_shuffle_f32x4(lanes, lanes, 0xB1), upper = 0xF0F0;
    if constexpr (kStride == 8) partner = _mm512_shuffle_f32x4(lanes, lanes, 0x4E), upper = 0xFF00;
    return {_mm512_mask_sub_ps(_mm512_add_ps(lanes, partner), upper, partner, lanes)};
  }
};

// The absolute values' bits. As integers they are ordered like the values, with NaN above all of them.
struct Magnitudes {
  __m512i lanes = _mm512_setzero_si512();

  void include(Floats values) {
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(values.lanes), _mm512_set1_epi32(0x7FFFFFFF));
    lanes = _mm512_max_epi32(lanes, bits);
  }
  int32_t largest() const { return _mm512_reduce_max_epi32(lanes); }
};

// Values rounded to nearest, ties to even, plus an offset, in 8 or 16 bits. They must fit.
inline void store_rounded(Floats values, int32_t offset, uint8_t* to) {
  const __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32(values.lanes), _mm512_set1_epi32(offset));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(rounded));
}

#else

struct Floats {
  static constexpr int64_t kLanes = 8;
  __m256 lanes;

  static Floats load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static Floats all(float value) { return {_mm256_set1_ps(value)}; }
  void store(float* to) const { _mm256_storeu_ps(to, lanes); }
  Floats operator+(Floats other) const { return {_mm256_add_ps(lanes, other.lanes)}; }
  Floats operator-(Floats other) const { return {_mm256_sub_ps(lanes, other.lanes)}; }
  Floats operator*(Floats other) const { return {_mm256_mul_ps(lanes, other.lanes)}; }

  template <int kStride>
  Floats butterfly() const {
    static_assert(kStride == 1 || kStride == 2 || kStride == 4);
    __m256 partner;
    if constexpr (kStride == 1) partner = _mm256_permute_ps(lanes, 0xB1);
    if constexpr (kStride == 2) partner = _mm256_permute_ps(lanes, 0x4E);
    if constexpr (kStride == 4) partner = _mm256_permute2f128_ps(lanes, lanes, 0x01);
    constexpr int kUpper = kStride == 1 ? 0xAA : kStride == 2 ? 0xCC : 0xF0;
    return {_mm256_blend_ps(_mm256_add_ps(lanes, partner), _mm256_sub_ps(partner, lanes), kUpper)};
  }
};

struct Magnitudes {
  __m256i lanes = _mm256_setzero_si256();

  void include(Floats values) {
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(values.lanes), _mm256_set1_epi32(0x7FFFFFFF));
    lanes = _mm256_max_epi32(lanes, bits);
  }
  int32_t largest() const {
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xB1));
    return _mm_cvtsi128_si32(half);
  }
};

inline __m128i rounded_16(Floats values, int32_t offset) {
  const __m256i rounded = _mm256_add_epi32(_mm256_cvtps_epi32(values.lanes), _mm256_set1_epi32(offset));
  return _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}

inline void store_rounded(Floats values, int32_t offset, int16_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), rounded_16(values, offset));
}

inline void store_rounded(Floats values, int32_t offset, uint8_t* to) {
  const __m128i packed = rounded_16(values, offset);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(packed, packed));
}

#endif

}  // namespace
}  // namespace actorserve
