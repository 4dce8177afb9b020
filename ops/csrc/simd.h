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
// Returns whether a lane exceeds x.
MS_INLINE bool is_any_above(f32x16 v, float x) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)splat(x), _CMP_GT_OQ) != 0;
#else
  return max_all(v)[0] > x;
#endif
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

typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef int8_t i8x32 __attribute__((vector_size(32)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef int16_t i16x8 __attribute__((vector_size(16)));

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
