#include "buffer.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>

namespace ms {
namespace {

constexpr size_t LINE = 64, HUGE_PAGE = size_t{2} << 20;
constexpr size_t SLAB = size_t{64} << 20, MIN_PART = size_t{64} << 10, MAX_PART = size_t{8} << 20;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

std::shared_ptr<void> allocate(size_t bytes) {
  const size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : LINE;
  void* data = std::aligned_alloc(align, round_up(bytes ? bytes : 1, align));
  if (!data) throw std::bad_alloc();
#if defined(__linux__)
  if (align == HUGE_PAGE) madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return {data, std::free};
}

// The slab that is being cut. Its memory is freed with the last of its parts.
std::mutex cutting;
std::weak_ptr<void> slab;
size_t used = 0;

std::shared_ptr<void> cut(size_t bytes) {
  std::lock_guard<std::mutex> lock(cutting);
  std::shared_ptr<void> whole = slab.lock();
  if (!whole || used + bytes > SLAB) {
    whole = allocate(SLAB);
    slab = whole;
    used = 0;
  }
  char* part = static_cast<char*>(whole.get()) + used;
  used += round_up(bytes, LINE);
  return {std::move(whole), part};
}

}  // namespace

Buffer::Buffer(size_t bytes)
    : data_(bytes >= MIN_PART && bytes <= MAX_PART ? cut(bytes) : allocate(bytes)), bytes_(bytes) {}

Buffer::Buffer(size_t bytes, const Span& there)
    : data_(std::shared_ptr<void>(), reinterpret_cast<void*>(there.address)), bytes_(bytes) {
  if (there.bytes != bytes) throw std::invalid_argument("a stored buffer has another size than the layer's");
  if (bytes && (!there.address || there.address % LINE))
    throw std::invalid_argument("a stored buffer does not begin a cache line");
}

}  // namespace ms
