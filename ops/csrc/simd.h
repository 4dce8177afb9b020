// Sixteen lanes on any machine: GCC's vector types, with intrinsics where they matter.
//
// Every kernel is written once on these types and compiled once per instruction set, each time
// in a namespace of its own (MS_ISA), so that the linker can never mix the copies up. Sums are
// written out with fma(): contraction is switched off, because the same row must give the same
// bits in every instance of a template.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define MS_INLINE inline __attribute__((always_inline))
#define MS_LAMBDA __attribute__((always_inline))

namespace MS_ISA {

#if defined(__AVX512F__)
constexpr bool HAS_32_REGISTERS = true;
#else
constexpr bool HAS_32_REGISTERS = false;
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef int8_t i8x32 __attribute__((vector_size(32)));

template <class V>
MS_INLINE V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}
template <class V>
MS_INLINE void store(void* to, V v) {
  std::memcpy(to, &v, sizeof(V));
}

template <class F, size_t... I>
MS_INLINE void unroll_each(F&& f, std::index_sequence<I...>) {
  (f(std::integral_constant<int, static_cast<int>(I)>{}), ...);
}
// f(0), ..., f(N - 1) with constant arguments, so that arrays indexed by them stay in registers.
template <int N, class F>
MS_INLINE void unroll(F&& f) {
  unroll_each(f, std::make_index_sequence<N>{});
}

#if defined(__aarch64__)
// f on each quarter of the vectors; left to itself, gcc 12 moves them through memory.
template <class F, class... V>
MS_INLINE i32x16 by_quarters(F&& f, const V&... all) {
  int32x4_t result[4];
  for (int i = 0; i < 4; i++) result[i] = f(load<int32x4_t>(reinterpret_cast<const char*>(&all) + 16 * i)...);
  return load<i32x16>(result);
}
MS_INLINE i32x16 splat_i32(int32_t x) {
  return by_quarters([&]() MS_LAMBDA { return vdupq_n_s32(x); });
}
MS_INLINE f32x16 splat(float x) {
  return (f32x16)by_quarters([&]() MS_LAMBDA { return vreinterpretq_s32_f32(vdupq_n_f32(x)); });
}
#else
MS_INLINE f32x16 splat(float x) { return f32x16{} + x; }
MS_INLINE i32x16 splat_i32(int32_t x) { return i32x16{} + x; }
#endif
MS_INLINE i32x16 splat_bytes(const void* four) {
  int32_t x;
  std::memcpy(&x, four, 4);
  return splat_i32(x);
}

MS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  struct Halves { __m256 lo, hi; } x, y, z;
  std::memcpy(&x, &a, 64), std::memcpy(&y, &b, 64), std::memcpy(&z, &c, 64);
  z.lo = _mm256_fmadd_ps(x.lo, y.lo, z.lo);
  z.hi = _mm256_fmadd_ps(x.hi, y.hi, z.hi);
  return load<f32x16>(&z);
#elif defined(__aarch64__)
  return (f32x16)by_quarters([](int32x4_t x, int32x4_t y, int32x4_t z) MS_LAMBDA {
    return (int32x4_t)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
  }, a, b, c);
#else
  return a * b + c;
#endif
}

MS_INLINE f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) {
  return (f32x16)(((i32x16)yes & mask) | ((i32x16)no & ~mask));
}
#if defined(__AVX2__)
// f(a, b) of each half: gcc compares vectors wider than a register lane by lane.
template <class F>
MS_INLINE f32x16 by_halves(f32x16 a, f32x16 b, F&& f) {
  struct Halves { __m256 lo, hi; } x, y;
  std::memcpy(&x, &a, 64), std::memcpy(&y, &b, 64);
  x.lo = f(x.lo, y.lo);
  x.hi = f(x.hi, y.hi);
  return load<f32x16>(&x);
}
#endif
// Of max and min: b where one of them is NaN.
MS_INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return by_halves(a, b, [](__m256 x, __m256 y) MS_LAMBDA { return _mm256_max_ps(x, y); });
#elif defined(__aarch64__)
  return (f32x16)by_quarters([](int32x4_t x, int32x4_t y) MS_LAMBDA {
    return vbslq_s32(vcgtq_f32((float32x4_t)x, (float32x4_t)y), x, y);
  }, a, b);
#else
  return select(a > b, a, b);
#endif
}
MS_INLINE f32x16 min(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return by_halves(a, b, [](__m256 x, __m256 y) MS_LAMBDA { return _mm256_min_ps(x, y); });
#elif defined(__aarch64__)
  return (f32x16)by_quarters([](int32x4_t x, int32x4_t y) MS_LAMBDA {
    return vbslq_s32(vcltq_f32((float32x4_t)x, (float32x4_t)y), x, y);
  }, a, b);
#else
  return select(a < b, a, b);
#endif
}
MS_INLINE f32x16 absolute(f32x16 a) { return (f32x16)((i32x16)a & 0x7fffffff); }

// The sum or the largest of all lanes, in every lane. Lanes are folded in halves, in one fixed
// order whatever the machine.
constexpr i32x16 LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
template <int BY>
MS_INLINE f32x16 swap_lanes(f32x16 v) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, BY, 1 ^ BY, 2 ^ BY, 3 ^ BY, 4 ^ BY, 5 ^ BY, 6 ^ BY, 7 ^ BY, 8 ^ BY,
                                 9 ^ BY, 10 ^ BY, 11 ^ BY, 12 ^ BY, 13 ^ BY, 14 ^ BY, 15 ^ BY);
#elif defined(__aarch64__)
  float32x4_t x[4], y[4];
  std::memcpy(x, &v, 64);
  for (int i = 0; i < 4; i++) {
    const float32x4_t q = x[i ^ BY / 4];
    y[i] = BY == 1 ? vrev64q_f32(q) : BY == 2 ? vextq_f32(q, q, 2) : q;
  }
  return load<f32x16>(y);
#else
  return __builtin_shuffle(v, LANES ^ BY);
#endif
}
MS_INLINE f32x16 sum_all(f32x16 v) {
  v += swap_lanes<8>(v);
  v += swap_lanes<4>(v);
  v += swap_lanes<2>(v);
  return v + swap_lanes<1>(v);
}
MS_INLINE f32x16 max_all(f32x16 v) {
  v = max(v, swap_lanes<8>(v));
  v = max(v, swap_lanes<4>(v));
  v = max(v, swap_lanes<2>(v));
  return max(v, swap_lanes<1>(v));
}
// The larger magnitudes. Compared as integers NaN is larger than any number, so that it is not lost
// as it would be in max().
MS_INLINE f32x16 max_magnitude(f32x16 a, f32x16 b) {
  const i32x16 x = (i32x16)absolute(a), y = (i32x16)absolute(b);
#if defined(__AVX512F__)
  return (f32x16)_mm512_max_epi32((__m512i)x, (__m512i)y);
#else
  return select(x > y, (f32x16)x, (f32x16)y);
#endif
}
MS_INLINE f32x16 max_magnitude_all(f32x16 v) {
  v = max_magnitude(v, swap_lanes<8>(v));
  v = max_magnitude(v, swap_lanes<4>(v));
  v = max_magnitude(v, swap_lanes<2>(v));
  return max_magnitude(v, swap_lanes<1>(v));
}
MS_INLINE float reduce_magnitude(f32x16 v) { return max_magnitude_all(v)[0]; }
MS_INLINE float reduce_add(f32x16 v) { return sum_all(v)[0]; }
MS_INLINE float reduce_max(f32x16 v) { return max_all(v)[0]; }
MS_INLINE int32_t reduce_add(i32x16 v) {
  int32_t x[16], sum = 0;
  store(x, v);
  for (int i = 0; i < 16; i++) sum += x[i];
  return sum;
}

MS_INLINE f32x16 to_float(i32x16 v) {
#if defined(__aarch64__)
  return (f32x16)by_quarters([](int32x4_t x) MS_LAMBDA { return (int32x4_t)vcvtq_f32_s32(x); }, v);
#else
  return __builtin_convertvector(v, f32x16);
#endif
}
MS_INLINE i32x16 to_int_nearest(f32x16 v) {  // ties to even
#if defined(__AVX512F__)
  return (i32x16)_mm512_cvtps_epi32((__m512)v);
#else
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: the sum keeps the integer in its low bits
  return (i32x16)(v + magic) - (i32x16)magic;
#endif
}
MS_INLINE f32x16 from_bf16(const uint16_t* p) {
  return (f32x16)(__builtin_convertvector(load<u16x16>(p), u32x16) << 16);
}
MS_INLINE f32x16 round_bf16(f32x16 v) {  // nearest, ties to even
  u32x16 bits = (u32x16)v;
  bits += 0x7fff + ((bits >> 16) & 1);
  return (f32x16)(bits & 0xffff0000u);
}
MS_INLINE void to_bf16(uint16_t* p, f32x16 v) {  // the same
  u32x16 bits = (u32x16)v;
  bits += 0x7fff + ((bits >> 16) & 1);
  store(p, __builtin_convertvector(bits >> 16, u16x16));
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
// Of a number that is not negative, as scales are. Rounds up, so that no value exceeds 127 of it.
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
MS_INLINE void scales_to_half(uint16_t* to, f32x16 x) {
#if defined(__AVX512F__)
  const f32x16 finite = min(splat(65504.0f), x);
  store(to, (u16x16)_mm512_cvtps_ph((__m512)finite, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < 16; i++) to[i] = scale_to_half(x[i]);
#endif
}
MS_INLINE f32x16 from_half(const uint16_t* p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps((__m256i)load<u16x16>(p));
#elif defined(__F16C__)
  struct Halves { __m256 lo, hi; } x = {_mm256_cvtph_ps(load<__m128i>(p)), _mm256_cvtph_ps(load<__m128i>(p + 8))};
  return load<f32x16>(&x);
#elif defined(__aarch64__)
  float32x4_t x[4];
  for (int i = 0; i < 4; i++) x[i] = vcvt_f32_f16(load<float16x4_t>(p + 4 * i));
  return load<f32x16>(x);
#else
  float x[16];
  for (int i = 0; i < 16; i++) x[i] = half_to_float(p[i]);
  return load<f32x16>(x);
#endif
}

// 2^x for -126 <= x <= 126 or NaN, relative error below 2e-7: split at the nearest integer, then the
// Taylor series of exp(r ln 2) for |r| <= 1/2.
MS_INLINE f32x16 exp2_small(f32x16 x) {
  const i32x16 whole = to_int_nearest(x);
  const f32x16 r = x - to_float(whole);
  f32x16 y = splat(1.5403530e-4f);
  y = fma(y, r, splat(1.3333558e-3f));
  y = fma(y, r, splat(9.6181291e-3f));
  y = fma(y, r, splat(5.5504109e-2f));
  y = fma(y, r, splat(2.4022651e-1f));
  y = fma(y, r, splat(6.9314718e-1f));
  y = fma(y, r, splat(1.0f));
  return (f32x16)((i32x16)y + (whole << 23));
}
MS_INLINE f32x16 exp2_neg(f32x16 x) { return exp2_small(max(splat(-126.0f), x)); }  // for x <= 0
constexpr float LOG2E = 1.44269504f, LN2 = 0.69314718f;
MS_INLINE f32x16 exp(f32x16 x) {  // clamped to what a float can hold
  return exp2_small(min(splat(126.0f), max(splat(-126.0f), x * LOG2E)));
}
MS_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }
MS_INLINE f32x16 tanh(f32x16 x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }
// Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7.
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

#if defined(__AVX2__)
// acc + f(a, b), which works on half a vector at a time.
template <class F>
MS_INLINE i32x16 add_halves(i32x16 acc, i32x16 a, i32x16 b, F&& f) {
  struct Halves { __m256i v[2]; } x, y, z;
  std::memcpy(&x, &acc, 64), std::memcpy(&y, &a, 64), std::memcpy(&z, &b, 64);
  for (int i = 0; i < 2; i++) x.v[i] = _mm256_add_epi32(x.v[i], f(y.v[i], z.v[i]));
  return load<i32x16>(&x);
}
#endif

// acc[i] += sum over j < 4 of unsigned byte w[4i + j] * signed byte x[4i + j].
MS_INLINE i32x16 dot_u8_i8(i32x16 acc, i32x16 w, i32x16 x) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
  return add_halves(acc, w, x, [](__m256i u, __m256i s) MS_LAMBDA {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0xff)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return _mm256_add_epi32(even, odd);
  });
#elif defined(__aarch64__)
  return by_quarters([](int32x4_t sum, int32x4_t u, int32x4_t s) MS_LAMBDA {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(sum, (uint8x16_t)u, (int8x16_t)s);
#elif defined(__ARM_FEATURE_DOTPROD)  // (u - 128) * s - (-128 * s)
    const int8x16_t offset = vdupq_n_s8(-128);
    const int32x4_t added = vdotq_s32(vdupq_n_s32(0), (int8x16_t)s, offset);
    return vdotq_s32(sum, (int8x16_t)u ^ offset, (int8x16_t)s) - added;
#else  // 255 * -128 still is an int16
    const int16x8_t even = ((int16x8_t)u & 255) * (((int16x8_t)s << 8) >> 8);
    const int16x8_t odd = (int16x8_t)((uint16x8_t)u >> 8) * ((int16x8_t)s >> 8);
    return vpadalq_s16(vpadalq_s16(sum, even), odd);
#endif
  }, acc, w, x);
#else
  for (int j = 0; j < 4; j++)
    acc += (i32x16)(((u32x16)w >> (8 * j)) & 255) * ((i32x16)((u32x16)x << (24 - 8 * j)) >> 24);
  return acc;
#endif
}
// acc[i] += sum over j < 2 of int16 v[2i + j] * int16 p[2i + j].
MS_INLINE i32x16 dot_i16(i32x16 acc, i32x16 v, i32x16 p) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)v, (__m512i)p);
#elif defined(__AVX2__)
  return add_halves(acc, v, p, [](__m256i a, __m256i b) MS_LAMBDA { return _mm256_madd_epi16(a, b); });
#elif defined(__aarch64__)
  return by_quarters([](int32x4_t sum, int32x4_t a, int32x4_t b) MS_LAMBDA {
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return sum + vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
  }, acc, v, p);
#else
  const i32x16 low = ((i32x16)((u32x16)v << 16) >> 16) * ((i32x16)((u32x16)p << 16) >> 16);
  return acc + low + (v >> 16) * (p >> 16);
#endif
}
// 32 signed bytes to 32 signed words.
MS_INLINE i32x16 widen_i8(const int8_t* p) {
#if defined(__AVX512BW__)
  return (i32x16)_mm512_cvtepi8_epi16((__m256i)load<i8x32>(p));
#elif defined(__aarch64__)
  int16x8_t x[4];
  for (int i = 0; i < 4; i++) x[i] = vmovl_s8(load<int8x8_t>(p + 8 * i));
  return load<i32x16>(x);
#else
  return (i32x16) __builtin_convertvector(load<i8x32>(p), i16x32);
#endif
}
MS_INLINE void store_i8(int8_t* p, i32x16 v) { store(p, __builtin_convertvector(v, i8x16)); }
MS_INLINE void store_i16(int16_t* p, i32x16 v) { store(p, __builtin_convertvector(v, i16x16)); }

MS_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// A vector that is this instruction set's own: the linker keeps one copy of std::vector<float>'s
// functions for all of them, and it may be one that this processor cannot run.
template <class T>
struct Local {
  using value_type = T;
  Local() = default;
  template <class U>
  Local(const Local<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T))); }
  void deallocate(T* p, size_t) { ::operator delete(p); }
  bool operator==(const Local&) const { return true; }
  bool operator!=(const Local&) const { return false; }
};
template <class T>
using List = std::vector<T, Local<T>>;

}  // namespace MS_ISA
