// Implements XXH3-64 without a seed for inputs longer than 240 bytes, after its specification
// (github.com/Cyan4973/xxHash, doc/xxhash_spec.md). It has eight 64-bit lanes and 1 KiB blocks.
#include "checksum.h"

#include <cstring>

#include "isa.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ms {
namespace {

constexpr uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9,
                   PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5, PRIME_MX1 = 0x165667919E3779F9;
constexpr size_t STRIPE = 64, STRIPES = 16, BLOCK = STRIPE * STRIPES;

alignas(64) constexpr uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

uint64_t read64(const uint8_t* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof value);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  value = __builtin_bswap64(value);
#endif
  return value;
}

void accumulate(uint64_t (&acc)[8], const uint8_t* stripe, const uint8_t* secret) {
  for (int i = 0; i < 8; i++) {
    const uint64_t word = read64(stripe + 8 * i), value = word ^ read64(secret + 8 * i);
    acc[i ^ 1] += word;
    acc[i] += (value & 0xffffffff) * (value >> 32);
  }
}

void add_blocks(uint64_t (&acc)[8], const uint8_t* data, size_t num_blocks) {
  for (; num_blocks > 0; num_blocks--, data += BLOCK) {
    for (size_t n = 0; n < STRIPES; n++) accumulate(acc, data + n * STRIPE, SECRET + 8 * n);
    for (int i = 0; i < 8; i++)
      acc[i] = (acc[i] ^ (acc[i] >> 47) ^ read64(SECRET + sizeof SECRET - STRIPE + 8 * i)) * PRIME32_1;
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline __m256i load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

__attribute__((target("avx2"))) void add_blocks_avx2(uint64_t (&acc)[8], const uint8_t* data, size_t num_blocks) {
  __m256i a[2] = {load(acc), load(acc + 4)};
  const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
  for (; num_blocks > 0; num_blocks--, data += BLOCK) {
    for (size_t n = 0; n < STRIPES; n++) {
      // Rows of K/V come from memory in long runs that the hardware prefetcher recognizes late.
      _mm_prefetch(reinterpret_cast<const char*>(data + n * STRIPE + 2 * BLOCK), _MM_HINT_T0);
      for (int h = 0; h < 2; h++) {
        const __m256i words = load(data + n * STRIPE + 32 * h);
        const __m256i value = _mm256_xor_si256(words, load(SECRET + 8 * n + 32 * h));
        const __m256i product = _mm256_mul_epu32(value, _mm256_srli_epi64(value, 32));
        a[h] = _mm256_add_epi64(a[h], _mm256_add_epi64(product, _mm256_shuffle_epi32(words, 0x4e)));
      }
    }
    for (int h = 0; h < 2; h++) {
      const __m256i key = load(SECRET + sizeof SECRET - STRIPE + 32 * h);
      const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(a[h], _mm256_srli_epi64(a[h], 47)), key);
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
      a[h] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
    }
  }
  for (int h = 0; h < 2; h++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc + 4 * h), a[h]);
}
#endif

uint64_t avalanche(uint64_t x) {
  x = (x ^ (x >> 37)) * PRIME_MX1;
  return x ^ (x >> 32);
}

}  // namespace

uint64_t checksum(const uint8_t* data, size_t size) {
  uint64_t acc[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
  const size_t num_blocks = (size - 1) / BLOCK;  // the last block, full or not, is processed below
#if defined(__x86_64__)
  if (&kernels() != portable_kernels())
    add_blocks_avx2(acc, data, num_blocks);
  else
#endif
    add_blocks(acc, data, num_blocks);
  const uint8_t* last = data + num_blocks * BLOCK;
  const size_t rest = size - num_blocks * BLOCK;
  for (size_t n = 0; n < (rest - 1) / STRIPE; n++) accumulate(acc, last + n * STRIPE, SECRET + 8 * n);
  accumulate(acc, data + size - STRIPE, SECRET + sizeof SECRET - 71);
  uint64_t result = size * PRIME64_1;
  for (int i = 0; i < 8; i += 2) {
    const auto product = static_cast<unsigned __int128>(acc[i] ^ read64(SECRET + 11 + 8 * i)) *
                         (acc[i + 1] ^ read64(SECRET + 19 + 8 * i));
    result += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  return avalanche(result);
}

}  // namespace ms
