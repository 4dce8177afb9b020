// Memory for packed weights, on huge pages where the system provides them.
//
// A buffer of a mixture's expert is about as large as one huge page. Such buffers are cut from slabs,
// so that they lie on huge pages and no buffer leaves most of its last one unused.
#pragma once

#include <cstddef>
#include <memory>

namespace ms {

class Buffer {
 public:
  // Throws std::bad_alloc.
  explicit Buffer(size_t bytes);
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  template <class T>
  T* as() const { return static_cast<T*>(data_.get()); }
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<void> data_;  // shares a slab with other buffers
  size_t bytes_;
};

}  // namespace ms
