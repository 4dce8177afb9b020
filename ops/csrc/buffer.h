// Memory for packed weights, on huge pages where the system provides them.
//
// A buffer of a mixture's expert is about as large as one huge page. Such buffers are cut from slabs,
// so that they lie on huge pages and no buffer leaves most of its last one unused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ms {

// Memory of somebody else, such as a mapped file.
struct Span {
  uintptr_t address = 0;
  size_t bytes = 0;
};

class Buffer {
 public:
  // Throws std::bad_alloc.
  explicit Buffer(size_t bytes);
  // Uses memory that is there and outlives this object. Throws std::invalid_argument unless it has this
  // size and begins a cache line.
  Buffer(size_t bytes, const Span& there);
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  template <class T>
  T* as() const { return static_cast<T*>(data_.get()); }
  size_t bytes() const { return bytes_; }
  Span span() const { return {reinterpret_cast<uintptr_t>(data_.get()), bytes_}; }

 private:
  std::shared_ptr<void> data_;  // shares a slab with other buffers
  size_t bytes_;
};

}  // namespace ms
