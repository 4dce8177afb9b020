#include "segments.h"

#include <stdexcept>

#include "crc32c.h"

namespace ms {

size_t total_bytes(const Segments& segments) {
  size_t total = 0;
  for (const Segment& segment : segments) {
    size_t bytes;
    if (__builtin_mul_overflow(segment.num_rows, segment.row_bytes, &bytes) ||
        __builtin_add_overflow(total, bytes, &total))
      throw std::overflow_error("segments of more bytes than there are addresses");
  }
  return total;
}

uint32_t gather(void* to, const Segments& segments) {
  auto* at = static_cast<uint8_t*>(to);
  uint32_t crc = 0;
  for_each_run(segments, [&](const uint8_t* from, size_t bytes) {
    crc = copy_crc32c(crc, at, from, bytes);
    at += bytes;
  });
  return crc;
}

uint32_t crc32c(const Segments& segments) {
  uint32_t crc = 0;
  for_each_run(segments, [&](const uint8_t* from, size_t bytes) { crc = crc32c(crc, from, bytes); });
  return crc;
}

}  // namespace ms
