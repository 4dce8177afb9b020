// Vectors of sixteen lanes on any machine: GCC's vector types, with intrinsics where they matter.
// Where registers are narrower, a vector consists of several registers.
//
// Every kernel is written once on these types and compiled once per instruction set, each time
// in a namespace of its own (MS_ISA), so that the linker never mixes up the copies. Sums use fma()
// explicitly: contraction is switched off, because the same row must give the same bits in every
// instance of a template.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
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
#if defined(__AVXVNNI__) && !defined(__AVX512F__)
#define MS_AVX_VNNI  // 16 registers of 32 bytes, with an instruction for byte dot products
constexpr bool IS_AVX_VNNI = true;
#else
constexpr bool IS_AVX_VNNI = false;
#endif

template <class F, size_t... I>
MS_INLINE void unroll_each(F&& f, std::index_sequence<I...>) {
  (f(std::integral_constant<int, static_cast<int>(I)>{}), ...);
}
// Calls f(0), ..., f(N - 1) with constant arguments, so that arrays indexed by them stay in registers.
template <int N, class F>
MS_INLINE void unroll(F&& f) {
  unroll_each(f, std::make_index_sequence<N>{});
}

#if defined(__AVX512F__)
template <class T>
struct WideOf { typedef T type __attribute__((vector_size(64))); };
template <class T>
using Wide = typename WideOf<T>::type;
#else
#if defined(__AVX2__)
constexpr size_t REGISTER = 32;
#else
constexpr size_t REGISTER = 16;
#endif

template <size_t I, class F, class... V>
MS_INLINE auto with_piece(F&& f, const V&... v) { return f(v.piece[I]...); }
template <class R, class F, size_t... I, class... V>
MS_INLINE R with_pieces(F&& f, std::index_sequence<I...>, const V&... v) {
  return {{(typename R::Piece)with_piece<I>(f, v...)...}};
}
// Applies f to each register of the vectors and casts its results to R.
template <class R, class F, class... V>
MS_INLINE R by_pieces(F&& f, const V&... v) {
  return with_pieces<R>(f, std::make_index_sequence<R::COUNT>{}, v...);
}

template <class T>
struct IntOf { using type = T; };
template <>
struct IntOf<float> { using type = int32_t; };
template <>
struct IntOf<uint32_t> { using type = int32_t; };
template <>
struct IntOf<double> { using type = int64_t; };

// A vector of 64 bytes in several registers. GCC would keep a built-in vector type of that size in
// memory.
template <class T>
struct Wide {
  typedef T Piece __attribute__((vector_size(REGISTER)));
  using Mask = Wide<typename IntOf<T>::type>;
  static constexpr int COUNT = 64 / REGISTER, EACH = REGISTER / sizeof(T);
  Piece piece[COUNT];

  // A reference to a lane. Its operators copy the piece first: taking the address of an element
  // would keep the whole piece in memory.
  struct Lane {
    Wide& of;
    int i;
    MS_INLINE operator T() const { return static_cast<const Wide&>(of)[i]; }
    MS_INLINE Lane& operator=(T x) {
      Piece p = of.piece[i / EACH];
      p[i % EACH] = x;
      of.piece[i / EACH] = p;
      return *this;
    }
  };
  MS_INLINE T operator[](int i) const {
    const Piece p = piece[i / EACH];
    return p[i % EACH];
  }
  MS_INLINE Lane operator[](int i) { return {*this, i}; }

  static MS_INLINE Wide all(T x) {
    Wide v;
    unroll<COUNT>([&](auto i) MS_LAMBDA { v.piece[i] = x - Piece{}; });
    return v;
  }
  template <class U>
  MS_INLINE explicit operator Wide<U>() const {  // keeps the bits
    return by_pieces<Wide<U>>([](auto x) MS_LAMBDA { return x; }, *this);
  }

#define MS_OPERATOR(R, op)                                                              \
  friend MS_INLINE R operator op(const Wide& a, const Wide& b) {                        \
    return by_pieces<R>([](auto x, auto y) MS_LAMBDA { return x op y; }, a, b);         \
  }                                                                                     \
  friend MS_INLINE R operator op(const Wide& a, T b) { return a op all(b); }            \
  friend MS_INLINE R operator op(T a, const Wide& b) { return all(a) op b; }
#define MS_ASSIGNMENT(op)                                                               \
  MS_OPERATOR(Wide, op)                                                                 \
  friend MS_INLINE Wide& operator op##=(Wide& a, const Wide& b) { return a = a op b; }  \
  friend MS_INLINE Wide& operator op##=(Wide& a, T b) { return a = a op b; }
#define MS_SHIFT(op)                                                                    \
  friend MS_INLINE Wide operator op(const Wide& a, int n) {                             \
    return by_pieces<Wide>([=](auto x) MS_LAMBDA { return x op n; }, a);                \
  }                                                                                     \
  friend MS_INLINE Wide& operator op##=(Wide& a, int n) { return a = a op n; }
  MS_ASSIGNMENT(+) MS_ASSIGNMENT(-) MS_ASSIGNMENT(*) MS_ASSIGNMENT(/)
  MS_ASSIGNMENT(&) MS_ASSIGNMENT(|) MS_ASSIGNMENT(^)
  MS_SHIFT(<<) MS_SHIFT(>>)
  MS_OPERATOR(Mask, <) MS_OPERATOR(Mask, <=) MS_OPERATOR(Mask, >) MS_OPERATOR(Mask, >=)
  MS_OPERATOR(Mask, ==) MS_OPERATOR(Mask, !=)
#undef MS_OPERATOR
#undef MS_ASSIGNMENT
#undef MS_SHIFT
  friend MS_INLINE Wide operator-(const Wide& a) {
    return by_pieces<Wide>([](auto x) MS_LAMBDA { return -x; }, a);
  }
  friend MS_INLINE Wide operator~(const Wide& a) {
    return by_pieces<Wide>([](auto x) MS_LAMBDA { return ~x; }, a);
  }
};
#endif

using f32x16 = Wide<float>;
using i32x16 = Wide<int32_t>;
using u32x16 = Wide<uint32_t>;
using f64x8 = Wide<double>;
using i64x8 = Wide<int64_t>;

template <class V>
MS_INLINE V load(const void* from) {
  V v;
#if !defined(__AVX512F__)
  if constexpr (std::is_class_v<V>) {
    unroll<V::COUNT>([&](auto i) MS_LAMBDA {
      v.piece[i] = load<typename V::Piece>(static_cast<const char*>(from) + i * REGISTER);
    });
    return v;
  } else
#endif
  std::memcpy(&v, from, sizeof(V));
  return v;
}
template <class V>
MS_INLINE void store(void* to, V v) {
#if !defined(__AVX512F__)
  if constexpr (std::is_class_v<V>)
    unroll<V::COUNT>([&](auto i) MS_LAMBDA { store(static_cast<char*>(to) + i * REGISTER, v.piece[i]); });
  else
#endif
  std::memcpy(to, &v, sizeof(V));
}

#if defined(__AVX512F__)
MS_INLINE f32x16 splat(float x) { return f32x16{} + x; }
MS_INLINE i32x16 splat_i32(int32_t x) { return i32x16{} + x; }
#else
MS_INLINE f32x16 splat(float x) { return f32x16::all(x); }
MS_INLINE i32x16 splat_i32(int32_t x) { return i32x16::all(x); }
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
  return by_pieces<f32x16>([](auto x, auto y, auto z) MS_LAMBDA {
    return _mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
  }, a, b, c);
#elif defined(__aarch64__)
  return by_pieces<f32x16>([](auto x, auto y, auto z) MS_LAMBDA {
    return vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
  }, a, b, c);
#else
  return a * b + c;
#endif
}
MS_INLINE f64x8 fma(f64x8 a, f64x8 b, f64x8 c) {
#if defined(__AVX512F__)
  return (f64x8)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  return by_pieces<f64x8>([](auto x, auto y, auto z) MS_LAMBDA {
    return _mm256_fmadd_pd((__m256d)x, (__m256d)y, (__m256d)z);
  }, a, b, c);
#else
  return a * b + c;
#endif
}

MS_INLINE f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) {
  return (f32x16)(((i32x16)yes & mask) | ((i32x16)no & ~mask));
}
// max and min return b where a or b is NaN.
MS_INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return by_pieces<f32x16>([](auto x, auto y) MS_LAMBDA { return _mm256_max_ps((__m256)x, (__m256)y); }, a, b);
#else
  return select(a > b, a, b);
#endif
}
MS_INLINE f32x16 min(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return by_pieces<f32x16>([](auto x, auto y) MS_LAMBDA { return _mm256_min_ps((__m256)x, (__m256)y); }, a, b);
#else
  return select(a < b, a, b);
#endif
}
MS_INLINE f32x16 absolute(f32x16 a) { return (f32x16)((i32x16)a & 0x7fffffff); }

// Reductions fold the lanes in halves, in the same order on every machine. Functions named *_all
// return the sum or maximum in every lane.
constexpr i32x16 LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
// Returns the lanes I of the concatenation of a and b.
template <class V, size_t... I>
MS_INLINE V shuffle(V a, V b, std::index_sequence<I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  using Index = std::conditional_t<sizeof a[0] == 4, int32_t, std::conditional_t<sizeof a[0] == 2, int16_t, int8_t>>;
  typedef Index Lanes __attribute__((vector_size(sizeof(V))));
  return __builtin_shuffle(a, b, Lanes{static_cast<Index>(I)...});
#endif
}
template <int BY, class V, size_t... I>
MS_INLINE V swapped(V v, std::index_sequence<I...>) {
  return shuffle(v, v, std::index_sequence<(I ^ BY)...>{});
}
template <int BY>
MS_INLINE f32x16 swap_lanes(f32x16 v) {
#if defined(__AVX512F__) && !defined(__clang__)
  return __builtin_shuffle(v, LANES ^ BY);
#elif defined(__AVX512F__)
  return swapped<BY>(v, std::make_index_sequence<16>{});
#else
  constexpr int EACH = f32x16::EACH;
  f32x16 result;
  unroll<f32x16::COUNT>([&](auto i) MS_LAMBDA {
    if constexpr (BY >= EACH) result.piece[i] = v.piece[i ^ BY / EACH];
    else result.piece[i] = swapped<BY>(v.piece[i], std::make_index_sequence<EACH>{});
  });
  return result;
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
// Returns the larger magnitudes. They are compared as integers, in which NaN exceeds any number, so
// that a NaN is not lost as in max().
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

typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef int8_t i8x32 __attribute__((vector_size(32)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
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
typedef int16_t i16x8 __attribute__((vector_size(16)));
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

// Makes the compiler load values again, which costs less than keeping them where registers are few.
MS_INLINE void forget_loads() { asm volatile("" ::: "memory"); }

MS_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// An allocator that makes List a separate type for each instruction set. The linker keeps only one
// copy of std::vector<float>'s functions, and this processor might not be able to run that copy.
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
