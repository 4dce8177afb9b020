#pragma once

#include <cstddef>
#include <cstdint>

namespace ms {

// XXH3-64 of more than 240 bytes.
uint64_t checksum(const uint8_t* data, size_t size);

}  // namespace ms
