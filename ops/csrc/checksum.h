#pragma once

#include <cstddef>
#include <cstdint>

namespace ms {

// Returns XXH3-64 of `size` bytes; `size` must exceed 240.
uint64_t checksum(const uint8_t* data, size_t size);

}  // namespace ms
