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

// Parts of a memfd whose memory is given back: part i has sizes[i] bytes from offsets[i] on.
struct Parts {
  int fd;
  const int64_t* offsets;
  const int64_t* sizes;
  size_t count;
};

// Transfers all blocks and waits until none is in flight, also after a failure. Nothing else uses
// the ring meanwhile. The memory of `leaving`, which no block uses, is given back while the disk
// works. Returns 0, or the errno of the first failure: EIO where the file ends.
int transfer_blocks(IoRing& ring, const Blocks& blocks, const Parts& leaving);

// Gives memory back. Returns 0, or the errno of the first failure, after which the other parts are
// still given back.
int punch(const Parts& parts);

}  // namespace ms
