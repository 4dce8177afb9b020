// Many blocks of equal size between memory and a file in one call, without the interpreter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "io_ring.h"

namespace ms {

// Block i is `length` bytes at the memory addresses[i] and at the file's offsets[i]; sums[i] becomes
// the low half of its checksum: of what was read, or of what is about to be written.
struct Blocks {
  bool is_write;
  const int64_t* addresses;
  const int64_t* offsets;
  uint32_t* sums;
  size_t count;
  size_t length;
};

// Transfers all blocks and waits until none is in flight, also after a failure. Nothing else uses
// the ring meanwhile. Returns 0, or the errno of the first failure: EIO where the file ends.
int transfer_blocks(IoRing& ring, const Blocks& blocks);

}  // namespace ms
