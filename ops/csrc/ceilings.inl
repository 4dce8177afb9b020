// Measures the machine's ceilings, to which benchmarks compare their results: reading memory, and
// multiplying numbers that are already in registers.

namespace MS_ISA {
namespace {

int64_t read_bytes(const void* from, size_t bytes) {
  constexpr size_t SHARE = size_t{1} << 20;
  List<int64_t> sums((bytes + SHARE - 1) / SHARE);
  ms::Team::get().parallel(static_cast<int>(sums.size()), [&](int task) {
    const char* at = static_cast<const char*>(from) + task * SHARE;
    const size_t size = bytes - task * SHARE < SHARE ? bytes - task * SHARE : SHARE;
    i32x16 sum[4] = {};
    for (size_t i = 0; i + 256 <= size; i += 256) {
      unroll<4>([&](auto j) MS_LAMBDA { sum[j] += load<i32x16>(at + i + 64 * j); });
      prefetch(at + i + 4096), prefetch(at + i + 4160), prefetch(at + i + 4224), prefetch(at + i + 4288);
    }
    sums[task] = reduce_add(sum[0] + sum[1] + sum[2] + sum[3]);
  });
  int64_t total = 0;
  for (int64_t sum : sums) total += sum;
  return total;
}

void copy_bytes(void* to, const void* from, size_t bytes) {
  constexpr size_t SHARE = size_t{1} << 16;
  ms::Team::get().parallel(static_cast<int>((bytes + SHARE - 1) / SHARE), [&](int task) {
    const size_t at = task * SHARE, size = bytes - at < SHARE ? bytes - at : SHARE;
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, size);
  });
}

constexpr int CHAINS = HAS_32_REGISTERS ? 24 : IS_AVX_VNNI ? 6 : 8;

// Runs `rounds` rounds of multiply-adds on every thread; each multiply-add counts as two operations.
double multiply_i8(int64_t rounds) {
  const int threads = ms::Team::get().size();
  List<int32_t> results(threads * 16);
  ms::Team::get().parallel(threads, [&](int task) {
#if defined(__AVX512F__) || defined(MS_AVX_VNNI)
    i32x16 sum[CHAINS], a = splat_i32(task + 3), b = splat_i32(task + 7);
#else  // a product takes several instructions, and the compiler would merge products of equal factors
    i32x16 sum[CHAINS], a[2], b[4];
    unroll<2>([&](auto i) MS_LAMBDA { a[i] = splat_i32(task + 3 + i); });
    unroll<4>([&](auto i) MS_LAMBDA { b[i] = splat_i32(task + 7 + i); });
#endif
    unroll<CHAINS>([&](auto i) MS_LAMBDA { sum[i] = splat_i32(i); });
    for (int64_t r = 0; r < rounds; r++) {
#if defined(__AVX512F__) || defined(MS_AVX_VNNI)
      unroll<CHAINS>([&](auto i) MS_LAMBDA { sum[i] = dot_u8_i8(sum[i], a, b); });
#else
      unroll<CHAINS>([&](auto i) MS_LAMBDA { sum[i] = dot_u8_i8(sum[i], a[i % 2], b[i / 2]); });
#endif
      asm volatile("" : "+m"(a), "+m"(b));
    }
    unroll<CHAINS>([&](auto i) MS_LAMBDA { results[task * 16] += reduce_add(sum[i]); });
  });
  return static_cast<double>(rounds) * threads * CHAINS * 64 * 2;
}

#if defined(__AVX512F__)
constexpr int F32_CHAINS = 12;
#elif defined(__AVX2__)
constexpr int F32_CHAINS = 6;  // of two registers each
#else
constexpr int F32_CHAINS = 2;
#endif

double multiply_f32(int64_t rounds) {
  const int threads = ms::Team::get().size();
  List<float> results(threads * 16);
  ms::Team::get().parallel(threads, [&](int task) {
    f32x16 sum[F32_CHAINS], a = splat(1.0f + task), b = splat(1e-9f);
    unroll<F32_CHAINS>([&](auto i) MS_LAMBDA { sum[i] = splat(i); });
    for (int64_t r = 0; r < rounds; r++) {
      unroll<F32_CHAINS>([&](auto i) MS_LAMBDA { sum[i] = fma(a, b, sum[i]); });
      asm volatile("" : "+m"(a), "+m"(b));
    }
    unroll<F32_CHAINS>([&](auto i) MS_LAMBDA { results[task * 16] += reduce_add(sum[i]); });
  });
  return static_cast<double>(rounds) * threads * F32_CHAINS * 16 * 2;
}

double multiply_bf16(int64_t rounds) {
#if defined(__AVX512BF16__)
  if (!__builtin_cpu_supports("avx512bf16")) return 0.0;
  const int threads = ms::Team::get().size();
  List<float> results(threads * 16);
  ms::Team::get().parallel(threads, [&](int task) {
    __m512 sum[CHAINS];
    i32x16 a = splat_i32(0x3f803f80 + task), b = splat_i32(0x3f803f81);
    unroll<CHAINS>([&](auto i) MS_LAMBDA { sum[i] = (__m512)splat(i); });
    for (int64_t r = 0; r < rounds; r++) {
      unroll<CHAINS>([&](auto i) MS_LAMBDA { sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)a, (__m512bh)b); });
      asm volatile("" : "+m"(a), "+m"(b));
    }
    unroll<CHAINS>([&](auto i) MS_LAMBDA { results[task * 16] += reduce_add((f32x16)sum[i]); });
  });
  return static_cast<double>(rounds) * threads * CHAINS * 32 * 2;
#else
  (void)rounds;
  return 0.0;
#endif
}

}  // namespace
}  // namespace MS_ISA
