// Vectors of floats, and what the kernels do with them, for AVX-512 and AVX2.
//
// They are the compiler's own vector types: + - * / and comparisons work lane by lane. An `Eight` is a register that
// both instruction sets have, so results computed with it have the same bits on both. `Floats` is the widest register.
// Lanes are always summed in the same order.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>

#if !defined(__AVX512VNNI__) && !defined(__AVX2__)
#error "build with AVX-512 VNNI or AVX2"
#endif

namespace actorserve {

typedef float Eight __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));

#if defined(__AVX512VNNI__)
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));  // each word is a float, or two bfloat16 of neighbouring dimensions
#else
using Floats = Eight;
using Words = EightWords;
#endif

template <class Vector>
constexpr int64_t kLanesOf = sizeof(Vector) / sizeof(float);
constexpr int64_t kLanes = kLanesOf<Floats>;

// --- memory ----------------------------------------------------------------------------------------------------------

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline Words load_words(const void* from) {
  Words x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

// The first `count` floats, and zeros beyond them.
inline Eight load(const float* from, int64_t count) {
  Eight x = {};
  if (count >= kLanesOf<Eight>) {
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  std::memcpy(&x, from, static_cast<size_t>(count) * sizeof(float));
  return x;
}

template <class Vector>
inline void store(float* to, Vector x) {
  std::memcpy(to, &x, sizeof(x));
}

// The first `count` of them.
inline void store(float* to, Eight x, int64_t count) {
  if (count >= kLanesOf<Eight>) return store(to, x);
  std::memcpy(to, &x, static_cast<size_t>(count) * sizeof(float));
}

// Prefetches a line of memory into the second level cache. (GCC would drop calls of a function that only calls the
// prefetch builtin, because it takes it for a function without effect.)
inline void fetch_line(const void* at) { asm volatile("prefetcht1 (%0)" : : "r"(at)); }

// --- arithmetic ------------------------------------------------------------------------------------------------------

template <class Vector = Floats>
inline Vector all(float x) {
  return x - Vector{};  // minus 0 changes no float, so the compiler leaves it out; plus 0 would make -0 a 0
}

// a * b + c, rounded once.
inline Eight multiply_add(Eight a, Eight b, Eight c) { return _mm256_fmadd_ps(a, b, c); }

inline Floats low_half(Words x) { return reinterpret_cast<Floats>(x << 16); }
inline Floats high_half(Words x) { return reinterpret_cast<Floats>(x & 0xffff0000u); }

#if defined(__AVX512VNNI__)

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats highest(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats round(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power_of_two(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }

// Lanes from `begin` to before `end`, and `other` in the rest.
inline Floats keep(Floats x, int64_t begin, int64_t end, Floats other) {
  const auto below = [](int64_t lane) { return lane >= kLanes ? 0xffffu : lane <= 0 ? 0u : (1u << lane) - 1u; };
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(below(end) & ~below(begin)), x);
}

// Lanes that are kStride apart become their sum and their difference.
template <int kStride>
Floats butterfly(Floats x) {
  static_assert(kStride == 1 || kStride == 2 || kStride == 4 || kStride == 8);
  __m512 partner;
  __mmask16 upper;
  if constexpr (kStride == 1) partner = _mm512_permute_ps(x, 0xB1), upper = 0xAAAA;
  if constexpr (kStride == 2) partner = _mm512_permute_ps(x, 0x4E), upper = 0xCCCC;
  if constexpr (kStride == 4) partner = _mm512_shuffle_f32x4(x, x, 0xB1), upper = 0xF0F0;
  if constexpr (kStride == 8) partner = _mm512_shuffle_f32x4(x, x, 0x4E), upper = 0xFF00;
  return _mm512_mask_sub_ps(_mm512_add_ps(x, partner), upper, partner, x);
}

// The absolute values' bits. As integers they are ordered like the values, with NaN above all of them.
struct Magnitudes {
  __m512i lanes = _mm512_setzero_si512();

  void include(Floats values) {
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7FFFFFFF));
    lanes = _mm512_max_epi32(lanes, bits);
  }
  int32_t largest() const { return _mm512_reduce_max_epi32(lanes); }
};

// Values rounded to nearest, ties to even, plus an offset, in 8 or 16 bits. They must fit.
inline void store_rounded(Floats values, int32_t offset, uint8_t* to) {
  const __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32(values), _mm512_set1_epi32(offset));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(rounded));
}

#else

inline Floats highest(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats round(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power_of_two(Floats x, Floats n) {  // n from -126 to 127
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}

inline Floats keep(Floats x, int64_t begin, int64_t end, Floats other) {
  const auto bounded = [](int64_t lane) { return static_cast<int>(lane < 0 ? 0 : lane > kLanes ? kLanes : lane); };
  const __m256i lane_numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i early = _mm256_cmpgt_epi32(_mm256_set1_epi32(bounded(begin)), lane_numbers);
  const __m256i on_time = _mm256_cmpgt_epi32(_mm256_set1_epi32(bounded(end)), lane_numbers);
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_andnot_si256(early, on_time)));
}

template <int kStride>
Floats butterfly(Floats x) {
  static_assert(kStride == 1 || kStride == 2 || kStride == 4);
  __m256 partner;
  if constexpr (kStride == 1) partner = _mm256_permute_ps(x, 0xB1);
  if constexpr (kStride == 2) partner = _mm256_permute_ps(x, 0x4E);
  if constexpr (kStride == 4) partner = _mm256_permute2f128_ps(x, x, 0x01);
  constexpr int kUpper = kStride == 1 ? 0xAA : kStride == 2 ? 0xCC : 0xF0;
  return _mm256_blend_ps(_mm256_add_ps(x, partner), _mm256_sub_ps(partner, x), kUpper);
}

struct Magnitudes {
  __m256i lanes = _mm256_setzero_si256();

  void include(Floats values) {
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0x7FFFFFFF));
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
  const __m256i rounded = _mm256_add_epi32(_mm256_cvtps_epi32(values), _mm256_set1_epi32(offset));
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

// --- over the lanes --------------------------------------------------------------------------------------------------

// Combines the two halves, until one lane is left.
template <class Vector, class Join>
inline float join_lanes(Vector x, const Join& join) {
  constexpr int64_t count = kLanesOf<Vector>;
  float lanes[count];
  store(lanes, x);
  for (int64_t half = count / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[i] = join(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

template <class Vector>
inline float sum_of_lanes(Vector x) {
  return join_lanes(x, [](float a, float b) { return a + b; });
}

inline float highest_of_lanes(Floats x) {
  return join_lanes(x, [](float a, float b) { return a > b ? a : b; });
}

// --- e^x -------------------------------------------------------------------------------------------------------------
//
// x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial of e^r, and n into the exponent (the usual method since
// Cody and Waite, 1980). Within 2 units in the last place.

constexpr float kOneByLn2 = 1.44269504088896341f;

template <class Vector>
inline Vector rest_of_exponent(Vector x, Vector n) {
  return multiply_add(n, all<Vector>(2.12194440e-4f), multiply_add(n, all<Vector>(-0.693359375f), x));
}

// p(r), where e^r = 1 + r + r^2 p(r).
template <class Vector>
inline Vector exp_polynomial(Vector r) {
  Vector p = all<Vector>(1.9875691500e-4f);
  p = multiply_add(p, r, all<Vector>(1.3981999507e-3f));
  p = multiply_add(p, r, all<Vector>(8.3334519073e-3f));
  p = multiply_add(p, r, all<Vector>(4.1665795894e-2f));
  p = multiply_add(p, r, all<Vector>(1.6666665459e-1f));
  return multiply_add(p, r, all<Vector>(5.0000001201e-1f));
}

// e^x for any x; 0 below -87, infinity above 88; NaN stays NaN.
inline Eight exp(Eight x) {
  // 1.5 * 2^23: the low bits are round(n)
  const Eight shifted = multiply_add(x, all<Eight>(kOneByLn2), all<Eight>(12582912.0f));
  const Eight r = rest_of_exponent(x, shifted - 12582912.0f);
  const Eight y = multiply_add(exp_polynomial(r), r * r, r) + 1.0f;
  // The low bits of 12582912.0f are 0, so this adds n to the exponent.
  Eight scaled = reinterpret_cast<Eight>(reinterpret_cast<EightWords>(y) +
                                         (reinterpret_cast<EightWords>(shifted) << 23));
  scaled = x > 88.0f ? all<Eight>(std::numeric_limits<float>::infinity()) : scaled;
  scaled = x == x ? scaled : x;
  return x < -87.0f ? Eight{} : scaled;
}

// e^x for x <= 0, in fewer operations, for attention's scores. 0 below -87 (minus infinity too); NaN stays NaN.
inline Floats exp_of_negative(Floats x) {
  const Floats n = round(x * kOneByLn2);
  const Floats r = rest_of_exponent(x, n);
  const Floats y = multiply_add(exp_polynomial(r), r * r, r + 1.0f);
  return x < -87.0f ? Floats{} : times_power_of_two(y, n);
}

inline float exp_of_negative(float x) { return exp_of_negative(all(x))[0]; }

}  // namespace actorserve
