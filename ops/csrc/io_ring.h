// Reads and writes one file by io_uring, with raw system calls and no library. Where the kernel's
// header is missing or older than Linux 5.11, the constructor fails with ENOSYS.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

struct io_uring_sqe;
struct io_uring_cqe;

namespace ms {

struct Region {
  uintptr_t address;
  size_t size;
};

struct Operation {
  uint64_t tag;
  bool is_write;
  uintptr_t address;
  uint32_t length;
  uint64_t offset;
};

struct Event {
  uint64_t tag;
  int32_t result;  // bytes, or -errno
};

// submit() and reap() may run in different threads at once. Failures throw std::system_error.
// The owner must reap all operations before it destroys the ring.
class IoRing {
 public:
  IoRing(int fd, unsigned depth, bool sqpoll, bool iopoll);
  ~IoRing();
  IoRing(const IoRing&) = delete;

  // Pins these regions of at most 1 GiB each, in place of the earlier ones. Operations inside one
  // region skip the kernel's page look-up.
  void register_buffers(std::vector<Region> regions);
  // Returns how many operations were accepted: fewer than given when `depth` are in flight or the
  // kernel lacks resources.
  size_t submit(const std::vector<Operation>& operations);
  // Waits for at least `at_least` events, but no longer than timeout_s.
  std::vector<Event> reap(unsigned at_least, double timeout_s);
  unsigned depth() const { return depth_; }

 private:
  void map_queues(const void* params);
  void unmap_queues();
  void fill(io_uring_sqe& entry, const Operation& operation) const;
  unsigned submit_queued(unsigned count);
  void drain(std::vector<Event>& events);

  int ring_ = -1, fd_ = -1;
  unsigned depth_ = 0;
  bool sqpoll_ = false, iopoll_ = false, has_fixed_file_ = false;
  void *sq_ = nullptr, *cq_ = nullptr, *sqes_ = nullptr;
  size_t sq_bytes_ = 0, cq_bytes_ = 0, sqe_bytes_ = 0;
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_flags_ = nullptr, *sq_array_ = nullptr;
  unsigned *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
  std::atomic<unsigned> in_flight_{0};
  std::vector<Region> regions_;  // sorted by address; written while no operation is submitted
  std::mutex submit_mutex_, reap_mutex_;
};

}  // namespace ms
