// Conversions between the number types of simd.h's vectors, exp, tanh and erf of them, and dot
// products of small integers.
#pragma once

#include "simd.h"

namespace MS_ISA {

MS_INLINE f32x16 to_float(i32x16 v) {
#if defined(__AVX512F__)
  return __builtin_convertvector(v, f32x16);
#else
  return by_pieces<f32x16>([](auto x) MS_LAMBDA { return __builtin_convertvector(x, f32x16::Piece); }, v);
#endif
}
MS_INLINE i32x16 to_int_nearest(f32x16 v) {  // ties to even
#if defined(__AVX512F__)
  return (i32x16)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return by_pieces<i32x16>([](auto x) MS_LAMBDA { return _mm256_cvtps_epi32((__m256)x); }, v);
#else
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: the sum keeps the integer in its low bits
  return (i32x16)(v + magic) - (i32x16)magic;
#endif
}

// Loads the vector of type N at p and widens it to V.
#if defined(__AVX512F__)
#define MS_WIDEN(V, N, p) __builtin_convertvector(load<N>(p), V)
#else
#define MS_WIDEN(V, N, p) widen<V, N>(p)
template <class V, class N>
MS_INLINE V widen(const void* p) {
  using T = std::decay_t<decltype(N{}[0])>;
  typedef T Narrow __attribute__((vector_size(V::EACH * sizeof(T))));
  V v;
  unroll<V::COUNT>([&](auto i) MS_LAMBDA {
    v.piece[i] = __builtin_convertvector(load<Narrow>(static_cast<const T*>(p) + i * V::EACH), typename V::Piece);
  });
  return v;
}
#endif

#if defined(__AVX512F__)
MS_INLINE void store_i8(int8_t* p, i32x16 v) { store(p, __builtin_convertvector(v, i8x16)); }
MS_INLINE void store_i16(int16_t* p, i32x16 v) { store(p, __builtin_convertvector(v, i16x16)); }
MS_INLINE void store_u16(uint16_t* p, u32x16 v) { store(p, __builtin_convertvector(v, u16x16)); }
#elif defined(__AVX2__)
MS_INLINE __m256i words_of(i32x16 v) {  // each from 0 to 65535
  return _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)v.piece[0], (__m256i)v.piece[1]), 0xd8);
}
MS_INLINE void store_u16(uint16_t* p, u32x16 v) { store(p, words_of((i32x16)v)); }
MS_INLINE void store_i16(int16_t* p, i32x16 v) { store(p, words_of(v & 0xffff)); }
MS_INLINE void store_i8(int8_t* p, i32x16 v) {
  const __m256i words = words_of(v & 0xff);
  store(p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
#else
template <class V, size_t... I>
MS_INLINE V evens(V a, V b, std::index_sequence<I...>) {
  return shuffle(a, b, std::index_sequence<2 * I...>{});
}
template <int I>
MS_INLINE i16x8 words_of(i32x16 v) {  // the low halves of eight lanes
  return evens((i16x8)v.piece[2 * I], (i16x8)v.piece[2 * I + 1], std::make_index_sequence<8>{});
}
MS_INLINE void store_i16(int16_t* p, i32x16 v) { store(p, words_of<0>(v)), store(p + 8, words_of<1>(v)); }
MS_INLINE void store_u16(uint16_t* p, u32x16 v) { store_i16(reinterpret_cast<int16_t*>(p), (i32x16)v); }
MS_INLINE void store_i8(int8_t* p, i32x16 v) {
  store(p, evens((i8x16)words_of<0>(v), (i8x16)words_of<1>(v), std::make_index_sequence<16>{}));
}
#endif

MS_INLINE i32x16 from_i8(const int8_t* p) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_cvtepi8_epi32(load<__m128i>(p));
#elif defined(__AVX2__)
  i32x16 v;  // gcc 12 splits a vector of 8 bytes
  unroll<2>([&](auto i) MS_LAMBDA {
    v.piece[i] = (i32x16::Piece)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
  });
  return v;
#else
  return MS_WIDEN(i32x16, i8x16, p);
#endif
}
MS_INLINE f32x16 from_bf16(const uint16_t* p) { return (f32x16)(MS_WIDEN(u32x16, u16x16, p) << 16); }
MS_INLINE f32x16 round_bf16(f32x16 v) {  // to nearest, ties to even
  u32x16 bits = (u32x16)v;
  bits += 0x7fff + ((bits >> 16) & 1);
  return (f32x16)(bits & 0xffff0000u);
}
MS_INLINE void to_bf16(uint16_t* p, f32x16 v) {  // to nearest, ties to even
  u32x16 bits = (u32x16)v;
  bits += 0x7fff + ((bits >> 16) & 1);
  store_u16(p, bits >> 16);
}

MS_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  uint32_t bits;
  float x;
  if (exponent == 0) {
    x = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits, &x, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7f800000u | mantissa << 13 : (exponent + 112) << 23 | mantissa << 13);
  }
  std::memcpy(&x, &bits, 4);
  return x;
}
// Converts a scale x >= 0 to fp16. It rounds up, so that no quantized value exceeds 127.
MS_INLINE uint16_t scale_to_half(float x) {
  uint32_t bits;
  if (x != x) return 0x7e00;
  if (x >= 65504.0f) return 0x7bff;
  if (x < 6.103515625e-5f) {  // subnormal halves
    const float steps = x * 16777216.0f;
    const uint32_t whole = static_cast<uint32_t>(steps);
    return static_cast<uint16_t>(whole + (static_cast<float>(whole) < steps));
  }
  std::memcpy(&bits, &x, 4);
  bits += 0x1fff;
  return static_cast<uint16_t>((bits >> 13) - (112u << 10));
}
// Converts |x| <= 65504 to fp16, to nearest, ties to even.
MS_INLINE uint16_t nearest_half(float x) {
  uint32_t bits, sign;
  std::memcpy(&bits, &x, 4);
  sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits < 0x38800000) {  // subnormal halves: the sum keeps a multiple of 2^-24 in its low bits
    float steps;
    std::memcpy(&steps, &bits, 4);
    steps = steps * 16777216.0f + 8388608.0f;
    std::memcpy(&bits, &steps, 4);
    return static_cast<uint16_t>(sign | (bits & 0x7fff));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((bits >> 13) - (112u << 10)));
}
// Returns the power of two above x >= 0 after x is rounded to the 11 bits of fp16, which is at least half
// of it, of those that are normal numbers in fp32; 1 for 0.
MS_INLINE float power_above(float x) {
  uint32_t bits;
  if (x == 0.0f) return 1.0f;
  std::memcpy(&bits, &x, 4);
  const uint32_t exponent = ((bits + 0x1000) >> 23) + 1;
  bits = (exponent > 254 ? 254 : exponent) << 23;
  std::memcpy(&x, &bits, 4);
  return x;
}
MS_INLINE void scales_to_half(uint16_t* to, f32x16 x) {
#if defined(__AVX512F__)
  const f32x16 finite = min(splat(65504.0f), x);
  store(to, (u16x16)_mm512_cvtps_ph((__m512)finite, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  const f32x16 finite = min(splat(65504.0f), x);
  unroll<2>([&](auto i) MS_LAMBDA {
    store(to + 8 * i, _mm256_cvtps_ph((__m256)finite.piece[i], _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
  });
#else
  for (int i = 0; i < 16; i++) to[i] = scale_to_half(x[i]);
#endif
}
MS_INLINE f32x16 from_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps((__m256i)load<u16x16>(p));
#elif defined(__F16C__)
  return {{(f32x16::Piece)_mm256_cvtph_ps(load<__m128i>(p)), (f32x16::Piece)_mm256_cvtph_ps(load<__m128i>(p + 8))}};
#elif defined(__aarch64__)
  f32x16 x;
  unroll<4>([&](auto i) MS_LAMBDA { x.piece[i] = (f32x16::Piece)vcvt_f32_f16(load<float16x4_t>(p + 4 * i)); });
  return x;
#else
  float x[16];
  for (int i = 0; i < 16; i++) x[i] = half_to_float(p[i]);
  return load<f32x16>(x);
#endif
}

// Returns 2^x for -126 <= x <= 126 or NaN with a relative error below 2e-7. x is split into the
// nearest integer and r; the polynomial has the least maximum relative error on |r| <= 1/2 of those
// that are 1 at 0.
MS_INLINE f32x16 exp2_small(f32x16 x) {
#if defined(__AVX512F__)
  const f32x16 whole = (f32x16)_mm512_roundscale_ps((__m512)x, 8), r = x - whole;
#else
  const i32x16 whole = to_int_nearest(x);
  const f32x16 r = x - to_float(whole);
#endif
  f32x16 y = splat(1.326472721e-3f);
  y = fma(y, r, splat(9.671512812e-3f));
  y = fma(y, r, splat(5.550733745e-2f));
  y = fma(y, r, splat(2.402224208e-1f));
  y = fma(y, r, splat(6.931469776e-1f));
  y = fma(y, r, splat(1.0f));
#if defined(__AVX512F__)
  return (f32x16)_mm512_scalef_ps((__m512)y, (__m512)whole);
#else
  return (f32x16)((i32x16)y + (whole << 23));
#endif
}
MS_INLINE f32x16 exp2_neg(f32x16 x) { return exp2_small(max(splat(-126.0f), x)); }  // for x <= 0
constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;
MS_INLINE f32x16 exp(f32x16 x) {  // x is clamped to the range of float results
  return exp2_small(min(splat(126.0f), max(splat(-126.0f), x * LOG2E)));
}
MS_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }
MS_INLINE f32x16 tanh(f32x16 x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }
// Formula 7.1.26 of Abramowitz and Stegun; the absolute error is below 1.5e-7.
MS_INLINE f32x16 erf(f32x16 x) {
  const f32x16 a = absolute(x), t = 1.0f / (1.0f + 0.3275911f * a);
  f32x16 y = splat(1.061405429f);
  y = fma(y, t, splat(-1.453152027f));
  y = fma(y, t, splat(1.421413741f));
  y = fma(y, t, splat(-0.284496736f));
  y = fma(y, t, splat(0.254829592f));
  y = 1.0f - y * t * exp(-a * a);
  return select(x < 0, -y, y);
}

// acc[i] += sum over j < 4 of unsigned byte w[4i + j] * signed byte x[4i + j].
MS_INLINE i32x16 dot_u8_i8(i32x16 acc, i32x16 w, i32x16 x) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
  return by_pieces<i32x16>([](auto sum, auto u, auto s) MS_LAMBDA {
    return _mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)u, (__m256i)s);
  }, acc, w, x);
#elif defined(__AVX2__)
  return by_pieces<i32x16>([](auto sum, auto unsigned_bytes, auto signed_bytes) MS_LAMBDA {
    const __m256i u = (__m256i)unsigned_bytes, s = (__m256i)signed_bytes;
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0xff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return _mm256_add_epi32((__m256i)sum, _mm256_add_epi32(even, odd));
  }, acc, w, x);
#elif defined(__aarch64__)
  return by_pieces<i32x16>([](auto sum, auto u, auto s) MS_LAMBDA {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32((int32x4_t)sum, (uint8x16_t)u, (int8x16_t)s);
#elif defined(__ARM_FEATURE_DOTPROD)  // (u - 128) * s - (-128 * s)
    const int8x16_t offset = vdupq_n_s8(-128);
    const int32x4_t added = vdotq_s32(vdupq_n_s32(0), (int8x16_t)s, offset);
    return vdotq_s32((int32x4_t)sum, (int8x16_t)u ^ offset, (int8x16_t)s) - added;
#else  // 255 * -128 fits into an int16
    const int16x8_t even = ((int16x8_t)u & 255) * (((int16x8_t)s << 8) >> 8);
    const int16x8_t odd = (int16x8_t)((uint16x8_t)u >> 8) * ((int16x8_t)s >> 8);
    return vpadalq_s16(vpadalq_s16((int32x4_t)sum, even), odd);
#endif
  }, acc, w, x);
#else
  for (int j = 0; j < 4; j++)
    acc += (i32x16)(((u32x16)w >> (8 * j)) & 255) * ((i32x16)((u32x16)x << (24 - 8 * j)) >> 24);
  return acc;
#endif
}
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define MS_PAIRS_OF_BYTES  // sums of two products in 16 bits are the fastest where the factors are small
// acc[i] += w[2i] * x[2i] + w[2i + 1] * x[2i + 1] for unsigned bytes w and signed bytes x, in 16 bits.
MS_INLINE i32x16 dot_pairs_u8_i8(i32x16 acc, i32x16 w, i32x16 x) {
  return by_pieces<i32x16>([](auto sum, auto u, auto s) MS_LAMBDA {
    return _mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)u, (__m256i)s));
  }, acc, w, x);
}
// acc[i] += pairs[2i] + pairs[2i + 1], of 16 bits.
MS_INLINE i32x16 add_pairs(i32x16 acc, i32x16 pairs) {
  return by_pieces<i32x16>([](auto sum, auto v) MS_LAMBDA {
    return _mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)v, _mm256_set1_epi16(1)));
  }, acc, pairs);
}
#endif
// acc[i] += sum over j < 2 of int16 v[2i + j] * int16 p[2i + j].
MS_INLINE i32x16 dot_i16(i32x16 acc, i32x16 v, i32x16 p) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)v, (__m512i)p);
#elif defined(__AVXVNNI__)
  return by_pieces<i32x16>([](auto sum, auto a, auto b) MS_LAMBDA {
    return _mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
  }, acc, v, p);
#elif defined(__AVX2__)
  return by_pieces<i32x16>([](auto sum, auto a, auto b) MS_LAMBDA {
    return _mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)a, (__m256i)b));
  }, acc, v, p);
#elif defined(__aarch64__)
  return by_pieces<i32x16>([](auto sum, auto a, auto b) MS_LAMBDA {
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return (int32x4_t)sum + vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
  }, acc, v, p);
#else
  const i32x16 low = ((i32x16)((u32x16)v << 16) >> 16) * ((i32x16)((u32x16)p << 16) >> 16);
  return acc + low + (v >> 16) * (p >> 16);
#endif
}
// The same as dot_u8_i8, for factors of which two products fit in 16 bits.
MS_INLINE i32x16 dot_small(i32x16 acc, i32x16 w, i32x16 x) {
#if defined(MS_PAIRS_OF_BYTES)
  return add_pairs(acc, dot_pairs_u8_i8(i32x16{}, w, x));
#else
  return dot_u8_i8(acc, w, x);
#endif
}
// Returns table[i] for each byte i < 16 of `indices`.
MS_INLINE i32x16 look_up(const int8_t (&table)[16], i32x16 indices) {
#if defined(__AVX512BW__)
  return (i32x16)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)indices);
#elif defined(__AVX2__)
  const __m256i twice = _mm256_broadcastsi128_si256(load<__m128i>(table));
  return by_pieces<i32x16>([=](auto i) MS_LAMBDA { return _mm256_shuffle_epi8(twice, (__m256i)i); }, indices);
#elif defined(__aarch64__)
  const int8x16_t entries = vld1q_s8(table);
  return by_pieces<i32x16>([=](auto i) MS_LAMBDA { return vqtbl1q_s8(entries, (uint8x16_t)i); }, indices);
#else
  uint8_t bytes[64];
  store(bytes, indices);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(table[byte]);
  return load<i32x16>(bytes);
#endif
}
// Widens 32 signed bytes to 32 signed 16-bit words.
MS_INLINE i32x16 widen_i8(const int8_t* p) {
#if defined(__AVX512BW__)
  return (i32x16)_mm512_cvtepi8_epi16((__m256i)load<i8x32>(p));
#else
  typedef int8_t Narrow __attribute__((vector_size(REGISTER / 2)));
  typedef int16_t Words __attribute__((vector_size(REGISTER)));
  i32x16 v;
  unroll<i32x16::COUNT>([&](auto i) MS_LAMBDA {
    v.piece[i] = (i32x16::Piece) __builtin_convertvector(load<Narrow>(p + i * REGISTER / 2), Words);
  });
  return v;
#endif
}

}  // namespace MS_ISA
