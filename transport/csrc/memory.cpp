#include "memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <stdexcept>
#include <system_error>

namespace ms {
namespace {

constexpr int SEALS = F_SEAL_SHRINK | F_SEAL_GROW;

uint8_t* map(size_t window_bytes, int flags, int fd) {
  void* at = mmap(nullptr, PAYLOAD_AT + window_bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a window");
  return static_cast<uint8_t*>(at);
}

}  // namespace

Memory::Memory(size_t window_bytes)
    : window_bytes_(window_bytes), base_(map(window_bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1)) {}

Memory::Memory(size_t window_bytes, int fd) : window_bytes_(window_bytes) {
  struct stat status;
  const int seals = fcntl(fd, F_GET_SEALS);
  // A process that can shrink the window could kill this one with SIGBUS.
  if (seals < 0 || (seals & SEALS) != SEALS) throw std::invalid_argument("a window that is not sealed");
  if (fstat(fd, &status) < 0 || status.st_size < static_cast<off_t>(PAYLOAD_AT + window_bytes))
    throw std::invalid_argument("a window that is too small");
  base_ = map(window_bytes, MAP_SHARED, fd);
}

Memory::~Memory() { munmap(base_, PAYLOAD_AT + window_bytes_); }

void Memory::keep_from_forks() const {
  if (madvise(base_, PAYLOAD_AT + window_bytes_, MADV_DONTFORK) < 0)
    throw std::system_error(errno, std::generic_category(), "madvise of a window");
}

void Memory::wake() const {
  header().num_wakes.fetch_add(1);
  syscall(SYS_futex, &header().num_wakes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int create_window_fd(size_t window_bytes) {
  const int fd = memfd_create("mergestep-window", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
  if (ftruncate(fd, static_cast<off_t>(PAYLOAD_AT + window_bytes)) < 0 || fcntl(fd, F_ADD_SEALS, SEALS | F_SEAL_SEAL) < 0) {
    const int number = errno;
    close(fd);
    throw std::system_error(number, std::generic_category(), "a memfd for a window");
  }
  return fd;
}

}  // namespace ms
