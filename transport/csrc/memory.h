#pragma once

#include <cstddef>
#include <cstdint>

#include "ring.h"

namespace ms {

// The mapping of one window.
class Memory {
 public:
  // Maps anonymous, zeroed memory. Throws std::system_error.
  explicit Memory(size_t window_bytes);
  // Maps a memfd, and leaves fd open. Throws std::invalid_argument if the memfd can shrink or is too
  // small.
  Memory(size_t window_bytes, int fd);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  size_t window_bytes() const { return window_bytes_; }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  Descriptor& slot(uint64_t number) const {
    return reinterpret_cast<Descriptor*>(base_ + DESCRIPTORS_AT)[number % NUM_SLOTS];
  }
  uint8_t* base() const { return base_; }
  size_t num_bytes() const { return PAYLOAD_AT + window_bytes_; }
  uint8_t* payload() const { return base_ + PAYLOAD_AT; }
  // Excludes the mapping from forks. Memory that a device writes needs this, since after a fork
  // copy-on-write may leave this process with copies of the pages.
  void keep_from_forks() const;
  // Wakes the threads that sleep on this window.
  void wake() const;

 private:
  size_t window_bytes_;
  uint8_t* base_;
};

// Creates a sealed memfd for a window. Throws std::system_error.
int create_window_fd(size_t window_bytes);

}  // namespace ms
