#pragma once

#include <cstddef>
#include <cstdint>

#include "ring.h"

namespace ms {

// The mapping of one window.
class Memory {
 public:
  // Anonymous, zeroed. std::system_error.
  explicit Memory(size_t window_bytes);
  // Of a memfd that cannot shrink; std::invalid_argument if it can, or is too small. fd stays open.
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
  // Memory that a device writes must stay this process's: a fork may leave it with copies.
  void keep_from_forks() const;
  // Wakes who sleeps on this window.
  void wake() const;

 private:
  size_t window_bytes_;
  uint8_t* base_;
};

// A sealed memfd for a window. std::system_error.
int create_window_fd(size_t window_bytes);

}  // namespace ms
