// There are two fast methods. Both make one pass over the bytes and can copy them in that pass.
// The first uses the processor's CRC instruction, which takes 3 cycles but can start every cycle: it
// computes three streams at once and joins their remainders by shifting one over the length of the
// next (a linear map, in tables). The second folds: carry-less multiplication maps 256 bytes onto the
// next 256 (Gopal et al., Intel 323102, 2009), until 64 bytes with the same remainder are left.
#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ms {
namespace {

constexpr uint32_t POLYNOMIAL = 0x82f63b78;  // in reflected bit order
constexpr size_t LONG = 2048, SHORT = 256;   // bytes of each of the three streams

using Table = std::array<std::array<uint32_t, 256>, 8>;
using Shift = std::array<std::array<uint32_t, 256>, 4>;

Table make_table() {
  Table table;
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
    table[0][byte] = crc;
  }
  for (int k = 1; k < 8; k++)
    for (int byte = 0; byte < 256; byte++)
      table[k][byte] = table[k - 1][byte] >> 8 ^ table[0][table[k - 1][byte] & 0xff];
  return table;
}

const Table& table() {
  static const Table made = make_table();
  return made;
}

uint64_t load64(const uint8_t* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

uint32_t crc_portable(uint32_t crc, const uint8_t* data, size_t size) {
  const Table& t = table();
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; size >= 8; size -= 8, data += 8) {
    const uint64_t word = load64(data) ^ crc;
    crc = 0;
    for (int k = 0; k < 8; k++) crc ^= t[7 - k][word >> 8 * k & 0xff];
  }
#endif
  for (; size > 0; size--) crc = crc >> 8 ^ t[0][(crc ^ *data++) & 0xff];
  return crc;
}

#if defined(__x86_64__)
// Makes the tables that advance a remainder over `length` zero bytes.
Shift make_shift(size_t length) {
  std::array<uint32_t, 32> of_bit;
  for (int bit = 0; bit < 32; bit++) {
    uint32_t crc = 1u << bit;
    for (size_t n = 0; n < length; n++) crc = crc >> 8 ^ table()[0][crc & 0xff];
    of_bit[bit] = crc;
  }
  Shift shift{};
  for (int k = 0; k < 4; k++)
    for (int byte = 0; byte < 256; byte++)
      for (int bit = 0; bit < 8; bit++)
        if (byte >> bit & 1) shift[k][byte] ^= of_bit[8 * k + bit];
  return shift;
}

const Shift SHIFT_LONG = make_shift(LONG), SHIFT_SHORT = make_shift(SHORT);

uint64_t shifted(const Shift& shift, uint64_t crc) {
  return shift[0][crc & 0xff] ^ shift[1][crc >> 8 & 0xff] ^ shift[2][crc >> 16 & 0xff] ^ shift[3][crc >> 24 & 0xff];
}

template <bool COPY>
inline uint64_t take(uint8_t* to, const uint8_t* from) {
  const uint64_t word = load64(from);
  if constexpr (COPY) std::memcpy(to, &word, sizeof word);
  return word;
}

template <bool COPY, size_t STREAM>
__attribute__((target("sse4.2"))) inline uint64_t crc_three(uint64_t crc, const Shift& shift, uint8_t* to,
                                                            const uint8_t* from) {
  uint64_t second = 0, third = 0;
  for (size_t i = 0; i < STREAM; i += 8) {
    crc = _mm_crc32_u64(crc, take<COPY>(to + i, from + i));
    second = _mm_crc32_u64(second, take<COPY>(to + STREAM + i, from + STREAM + i));
    third = _mm_crc32_u64(third, take<COPY>(to + 2 * STREAM + i, from + 2 * STREAM + i));
  }
  return shifted(shift, shifted(shift, crc) ^ second) ^ third;
}

template <bool COPY>
__attribute__((target("sse4.2"))) uint32_t crc_sse42(uint32_t begin, uint8_t* to, const uint8_t* from, size_t size) {
  uint64_t crc = begin;
  const auto advance = [&](size_t bytes) {
    from += bytes;
    if (COPY) to += bytes;
    size -= bytes;
  };
  for (; size >= 3 * LONG; advance(3 * LONG)) crc = crc_three<COPY, LONG>(crc, SHIFT_LONG, to, from);
  for (; size >= 3 * SHORT; advance(3 * SHORT)) crc = crc_three<COPY, SHORT>(crc, SHIFT_SHORT, to, from);
  for (; size >= 8; advance(8)) crc = _mm_crc32_u64(crc, take<COPY>(to, from));
  for (; size > 0; advance(1)) {
    if (COPY) *to = *from;
    crc = _mm_crc32_u8(static_cast<uint32_t>(crc), *from);
  }
  return static_cast<uint32_t>(crc);
}

// Returns x^n modulo the polynomial, in the reflected order that the multiplication needs.
uint64_t power_of_x(unsigned n) {
  uint32_t value = 0x80000000;
  for (; n > 0; n--) value = value & 1 ? value >> 1 ^ POLYNOMIAL : value >> 1;
  return static_cast<uint64_t>(value) << 1;
}

// The factors that move a lane's first and second 8 bytes `bits` ahead.
struct Fold {
  explicit Fold(unsigned bits) : first(power_of_x(bits + 32)), second(power_of_x(bits - 32)) {}
  uint64_t first, second;
};
const Fold FOLD_256_BYTES(2048), FOLD_64_BYTES(512);

#define MS_FOLDING __attribute__((target("avx512f,avx512dq,vpclmulqdq,pclmul,sse4.2")))

MS_FOLDING inline __m512i constants(const Fold& fold) {
  return _mm512_broadcast_i32x4(_mm_set_epi64x(static_cast<int64_t>(fold.second), static_cast<int64_t>(fold.first)));
}

MS_FOLDING inline __m512i folded(__m512i lanes, __m512i by, __m512i onto) {
  const __m512i first = _mm512_clmulepi64_epi128(lanes, by, 0x00), second = _mm512_clmulepi64_epi128(lanes, by, 0x11);
  return _mm512_ternarylogic_epi64(first, second, onto, 0x96);  // xor of the three
}

template <bool COPY>
MS_FOLDING inline __m512i take_lanes(uint8_t* to, const uint8_t* from) {
  const __m512i lanes = _mm512_loadu_si512(from);
  if constexpr (COPY) _mm512_storeu_si512(to, lanes);
  return lanes;
}

// Computes the remainder of `size` bytes, a multiple of 256.
template <bool COPY>
MS_FOLDING uint32_t crc_folding(uint32_t crc, uint8_t* to, const uint8_t* from, size_t size) {
  __m512i lanes[4];
  for (int i = 0; i < 4; i++) lanes[i] = take_lanes<COPY>(to + 64 * i, from + 64 * i);
  lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  const __m512i far = constants(FOLD_256_BYTES), near = constants(FOLD_64_BYTES);
  for (size_t at = 256; at + 256 <= size; at += 256)
    for (int i = 0; i < 4; i++)
      lanes[i] = folded(lanes[i], far, take_lanes<COPY>(to + at + 64 * i, from + at + 64 * i));
  for (int i = 1; i < 4; i++) lanes[i] = folded(lanes[i - 1], near, lanes[i]);
  alignas(64) uint64_t rest[8];
  _mm512_store_si512(rest, lanes[3]);
  uint64_t remainder = 0;
  for (const uint64_t word : rest) remainder = _mm_crc32_u64(remainder, word);
  return static_cast<uint32_t>(remainder);
}

const bool HAS_FOLDING = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                         __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("sse4.2");
constexpr size_t FOLDING_PAYS = 512;

template <bool COPY>
uint32_t crc_x86(uint32_t crc, uint8_t* to, const uint8_t* from, size_t size) {
  size_t done = 0;
  if (HAS_FOLDING && size >= FOLDING_PAYS) {
    done = size / 256 * 256;
    crc = crc_folding<COPY>(crc, to, from, done);
  }
  return crc_sse42<COPY>(crc, COPY ? to + done : nullptr, from + done, size - done);
}

const bool HAS_SSE42 = __builtin_cpu_supports("sse4.2");
#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t size) {
  const auto* from = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  if (HAS_SSE42) return ~crc_x86<false>(~crc, nullptr, from, size);
#endif
  return ~crc_portable(~crc, from, size);
}

uint32_t copy_crc32c(uint32_t crc, void* to, const void* from, size_t size) {
#if defined(__x86_64__)
  if (HAS_SSE42)
    return ~crc_x86<true>(~crc, static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), size);
#endif
  std::memcpy(to, from, size);
  return crc32c(crc, to, size);
}

}  // namespace ms
