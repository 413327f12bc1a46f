// Eight floats at once, as the compiler's own vector type, in a register that AVX2 and AVX-512 both have: the same bits
// on both. Functions whose bits must not follow the shape of their input work on whole vectors, with zeros beyond its
// end.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>

namespace actorserve {

constexpr int64_t kLanes = 8;

typedef float Lanes __attribute__((vector_size(32)));
typedef uint32_t IntLanes __attribute__((vector_size(32)));

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

// The first `count` floats, and zeros.
inline Lanes load(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  Lanes lanes = {};
  std::memcpy(&lanes, from, static_cast<size_t>(count) * sizeof(float));
  return lanes;
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof(lanes)); }

// The first `count` of them.
inline void store(float* to, Lanes lanes, int64_t count) {
  if (count >= kLanes) return store(to, lanes);
  std::memcpy(to, &lanes, static_cast<size_t>(count) * sizeof(float));
}

// a * b + c, rounded once.
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }

inline Lanes all(float value) { return Lanes{} + value; }

// The sum of the lanes, always in the same order.
inline float sum(Lanes lanes) {
  float values[kLanes];
  store(values, lanes);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) values[i] += values[i + half];
  }
  return values[0];
}

// e^x, within 2 units in the last place; 0 below -87, infinity above 88.
//
// x = n ln 2 + r with |r| <= ln 2 / 2; a polynomial of e^r, and n into the exponent (as in every such function since
// Cody and Waite, 1980).
inline Lanes exp(Lanes x) {
  const Lanes shifted = fma(x, all(1.44269504088896341f), all(12582912.0f));  // 1.5 * 2^23: the low bits are round(n)
  const Lanes n = shifted - 12582912.0f;
  const Lanes r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x));
  Lanes y = all(1.9875691500e-4f);
  y = fma(y, r, all(1.3981999507e-3f));
  y = fma(y, r, all(8.3334519073e-3f));
  y = fma(y, r, all(4.1665795894e-2f));
  y = fma(y, r, all(1.6666665459e-1f));
  y = fma(y, r, all(5.0000001201e-1f));
  y = fma(y, r * r, r) + 1.0f;
  IntLanes bits, power;
  std::memcpy(&bits, &y, sizeof(bits));
  std::memcpy(&power, &shifted, sizeof(power));
  bits += power << 23;  // what 12582912.0f has in its lowest bits is 0, so this adds n to the exponent
  std::memcpy(&y, &bits, sizeof(y));
  y = x > 88.0f ? all(std::numeric_limits<float>::infinity()) : y;
  y = x == x ? y : x;  // a NaN stays one
  return x < -87.0f ? Lanes{} : y;
}

}  // namespace actorserve
