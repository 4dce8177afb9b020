#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ms {

// num_rows pieces of row_bytes each, stride_bytes apart.
struct Segment {
  const uint8_t* data;
  size_t num_rows, row_bytes;
  ptrdiff_t stride_bytes;

  bool is_contiguous() const { return num_rows == 1 || stride_bytes == static_cast<ptrdiff_t>(row_bytes); }
};
using Segments = std::vector<Segment>;

// Throws std::overflow_error if the sum exceeds size_t.
size_t total_bytes(const Segments& segments);
// Copies the segments one after the other to `to` and returns the CRC-32C of all their bytes.
uint32_t gather(void* to, const Segments& segments);
// Returns the same CRC-32C without a copy.
uint32_t crc32c(const Segments& segments);

// Calls run(pointer, bytes) for each contiguous piece.
template <class Run>
void for_each_run(const Segments& segments, Run run) {
  for (const Segment& segment : segments) {
    if (segment.num_rows == 0 || segment.row_bytes == 0) continue;
    if (segment.is_contiguous()) {
      run(segment.data, segment.num_rows * segment.row_bytes);
    } else {
      for (size_t row = 0; row < segment.num_rows; row++)
        run(segment.data + static_cast<ptrdiff_t>(row) * segment.stride_bytes, segment.row_bytes);
    }
  }
}

}  // namespace ms
