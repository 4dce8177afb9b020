#pragma once

#include <cstddef>
#include <cstdint>

namespace ms {

// Returns the CRC-32C (Castagnoli), continued from `crc`; 0 begins a new one.
uint32_t crc32c(uint32_t crc, const void* data, size_t size);
// Copies `size` bytes to `to` and returns their CRC-32C, continued from `crc`.
uint32_t copy_crc32c(uint32_t crc, void* to, const void* from, size_t size);

}  // namespace ms
