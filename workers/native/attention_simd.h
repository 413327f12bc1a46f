// One vector of floats of the widest kind, and the few things that attention does with it, for AVX-512 and AVX2.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace actorserve::attention {

#if defined(__AVX512VNNI__)

using Floats = __m512;
using Words = __m512i;  // 32 bits each: a float, or two bfloat16 of neighbouring dimensions

constexpr int64_t kLanes = 16;

inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats highest(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats subtract_product(Floats c, Floats a, Floats b) { return _mm512_fnmadd_ps(a, b, c); }

// Lanes from `begin` to before `end`, and `other` in the rest.
inline Floats keep(Floats x, int64_t begin, int64_t end, Floats other) {
  const auto below = [](int64_t lane) { return lane >= kLanes ? 0xffffu : lane <= 0 ? 0u : (1u << lane) - 1u; };
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(below(end) & ~below(begin)), x);
}

inline Floats round(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power_of_two(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }

// x where `judged` is not below `bound` (NaN is not), else 0.
inline Floats zero_below(Floats x, Floats judged, Floats bound) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(judged, bound, _CMP_NLT_UQ), x);
}

inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }
inline Floats low_half(Words x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline Floats high_half(Words x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

#else

using Floats = __m256;
using Words = __m256i;

constexpr int64_t kLanes = 8;

inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats highest(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats subtract_product(Floats c, Floats a, Floats b) { return _mm256_fnmadd_ps(a, b, c); }

inline Words lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

inline Floats keep(Floats x, int64_t begin, int64_t end, Floats other) {
  const auto bounded = [](int64_t lane) { return static_cast<int>(lane < 0 ? 0 : lane > kLanes ? kLanes : lane); };
  const Words early = _mm256_cmpgt_epi32(_mm256_set1_epi32(bounded(begin)), lane_numbers());
  const Words on_time = _mm256_cmpgt_epi32(_mm256_set1_epi32(bounded(end)), lane_numbers());
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_andnot_si256(early, on_time)));
}

inline Floats round(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power_of_two(Floats x, Floats n) {  // n from -126 to 127
  const Words exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
inline Floats zero_below(Floats x, Floats judged, Floats bound) {
  return _mm256_and_ps(x, _mm256_cmp_ps(judged, bound, _CMP_NLT_UQ));
}

inline Words load_words(const void* from) { return _mm256_loadu_si256(static_cast<const Words*>(from)); }
inline Floats low_half(Words x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline Floats high_half(Words x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

#endif

// Ask for a line of memory, to lie in the second level cache when it is needed. (GCC takes a function that does nothing
// but prefetch with its builtin for one without effect, and drops the calls.)
inline void fetch_line(const void* at) { asm volatile("prefetcht1 (%0)" : : "r"(at)); }

// The lanes' sum, always in the same order.
inline float sum_of_lanes(Floats x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

inline float highest_of_lanes(Floats x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  }
  return lanes[0];
}

// e^x for x <= 0, within 2 units in the last place: x = n ln 2 + r (Cody and Waite, 1980) and a polynomial of e^r.
// Exactly 0 below -87 (minus infinity too); NaN stays.
inline Floats exp_of_negative(Floats x) {
  const Floats n = round(multiply(x, all(1.44269504088896341f)));
  const Floats r = subtract_product(subtract_product(x, n, all(0.693359375f)), n, all(-2.12194440e-4f));
  Floats y = all(1.9875691500e-4f);
  y = multiply_add(y, r, all(1.3981999507e-3f));
  y = multiply_add(y, r, all(8.3334519073e-3f));
  y = multiply_add(y, r, all(4.1665795894e-2f));
  y = multiply_add(y, r, all(1.6666665459e-1f));
  y = multiply_add(y, r, all(5.0000001201e-1f));
  y = multiply_add(y, multiply(r, r), add(r, all(1.0f)));
  return zero_below(times_power_of_two(y, n), x, all(-87.0f));
}

inline float exp_of_negative(float x) {
  float lanes[kLanes];
  store(lanes, exp_of_negative(all(x)));
  return lanes[0];
}

}  // namespace actorserve::attention
