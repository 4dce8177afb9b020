#include "io_ring.h"

#include <cerrno>
#include <system_error>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#if defined(IORING_ENTER_EXT_ARG)  // Linux 5.11 added waiting with a time-out
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace ms {
namespace {

constexpr unsigned SQPOLL_IDLE_MS = 20;
constexpr int MAX_BUSY = 1000;

[[noreturn]] void fail(int number, const char* call) {
  throw std::system_error(number, std::generic_category(), call);
}

int enter(int ring, unsigned submit, unsigned complete, unsigned flags, const void* arg, size_t size) {
  return static_cast<int>(syscall(__NR_io_uring_enter, ring, submit, complete, flags, arg, size));
}

int register_with(int ring, unsigned what, const void* arg, unsigned count) {
  return static_cast<int>(syscall(__NR_io_uring_register, ring, what, arg, count));
}

void* map_queue(int ring, size_t bytes, uint64_t offset) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, static_cast<off_t>(offset));
  return at == MAP_FAILED ? nullptr : at;
}

template <class T>
T* at(void* base, size_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

}  // namespace

IoRing::IoRing(int fd, unsigned depth, bool sqpoll, bool iopoll)
    : fd_(fd), depth_(depth), sqpoll_(sqpoll), iopoll_(iopoll) {
  io_uring_params params{};
  params.flags = (sqpoll ? IORING_SETUP_SQPOLL : 0u) | (iopoll ? IORING_SETUP_IOPOLL : 0u);
  params.sq_thread_idle = SQPOLL_IDLE_MS;
  ring_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
  if (ring_ < 0) fail(errno, "io_uring_setup");
  if (!(params.features & IORING_FEAT_EXT_ARG)) {
    close(ring_);
    fail(ENOSYS, "io_uring before Linux 5.11");
  }
  map_queues(&params);
  // A registered file saves the descriptor look-up of every operation, and the ring keeps it open.
  has_fixed_file_ = register_with(ring_, IORING_REGISTER_FILES, &fd_, 1) == 0;
}

IoRing::~IoRing() {
  unmap_queues();
  close(ring_);
}

void IoRing::map_queues(const void* given) {
  const auto& params = *static_cast<const io_uring_params*>(given);
  sq_bytes_ = params.sq_off.array + params.sq_entries * sizeof(unsigned);
  cq_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  sqe_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  sq_ = map_queue(ring_, sq_bytes_, IORING_OFF_SQ_RING);
  cq_ = map_queue(ring_, cq_bytes_, IORING_OFF_CQ_RING);
  sqes_ = map_queue(ring_, sqe_bytes_, IORING_OFF_SQES);
  if (!sq_ || !cq_ || !sqes_) {
    const int number = errno;
    unmap_queues();
    close(ring_);
    fail(number, "io_uring: mmap");
  }
  sq_head_ = at<unsigned>(sq_, params.sq_off.head);
  sq_tail_ = at<unsigned>(sq_, params.sq_off.tail);
  sq_flags_ = at<unsigned>(sq_, params.sq_off.flags);
  sq_array_ = at<unsigned>(sq_, params.sq_off.array);
  sq_mask_ = *at<unsigned>(sq_, params.sq_off.ring_mask);
  cq_head_ = at<unsigned>(cq_, params.cq_off.head);
  cq_tail_ = at<unsigned>(cq_, params.cq_off.tail);
  cq_mask_ = *at<unsigned>(cq_, params.cq_off.ring_mask);
  cqes_ = at<io_uring_cqe>(cq_, params.cq_off.cqes);
}

void IoRing::unmap_queues() {
  if (sq_) munmap(sq_, sq_bytes_);
  if (cq_) munmap(cq_, cq_bytes_);
  if (sqes_) munmap(sqes_, sqe_bytes_);
}

void IoRing::register_buffers(std::vector<Region> regions) {
  std::lock_guard lock(submit_mutex_);
  if (!regions_.empty()) register_with(ring_, IORING_UNREGISTER_BUFFERS, nullptr, 0);
  regions_.clear();
  if (regions.empty()) return;
  std::sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) { return a.address < b.address; });
  std::vector<iovec> buffers;
  for (const Region& region : regions) buffers.push_back({reinterpret_cast<void*>(region.address), region.size});
  if (register_with(ring_, IORING_REGISTER_BUFFERS, buffers.data(), static_cast<unsigned>(buffers.size())) < 0)
    fail(errno, "io_uring: registering buffers");
  regions_ = std::move(regions);
}

void IoRing::fill(io_uring_sqe& entry, const Operation& operation) const {
  std::memset(&entry, 0, sizeof entry);
  entry.opcode = operation.is_write ? IORING_OP_WRITE : IORING_OP_READ;
  entry.fd = has_fixed_file_ ? 0 : fd_;
  entry.flags = has_fixed_file_ ? IOSQE_FIXED_FILE : 0;
  entry.addr = operation.address;
  entry.len = operation.length;
  entry.off = operation.offset;
  entry.user_data = operation.tag;
  auto after = std::upper_bound(regions_.begin(), regions_.end(), operation.address,
                                [](uintptr_t address, const Region& region) { return address < region.address; });
  if (after == regions_.begin()) return;
  const Region& region = *--after;
  if (operation.address + operation.length > region.address + region.size) return;
  entry.opcode = operation.is_write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
  entry.buf_index = static_cast<uint16_t>(after - regions_.begin());
}

size_t IoRing::submit(const std::vector<Operation>& operations) {
  std::lock_guard lock(submit_mutex_);
  const unsigned room = depth_ - in_flight_.load();
  const unsigned count = static_cast<unsigned>(std::min<size_t>(operations.size(), room));
  if (count == 0) return 0;
  unsigned tail = *sq_tail_;
  for (unsigned i = 0; i < count; i++, tail++) {
    fill(static_cast<io_uring_sqe*>(sqes_)[tail & sq_mask_], operations[i]);
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
  }
  in_flight_ += count;
  __atomic_store_n(sq_tail_, tail, __ATOMIC_RELEASE);
  if (!sqpoll_) return submit_queued(count);
  // The kernel's submission thread sleeps after SQPOLL_IDLE_MS without work and must be woken.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (__atomic_load_n(sq_flags_, __ATOMIC_ACQUIRE) & IORING_SQ_NEED_WAKEUP)
    enter(ring_, count, 0, IORING_ENTER_SQ_WAKEUP, nullptr, 0);
  return count;
}

// Submits `count` entries and removes those that the kernel does not accept from the queue.
unsigned IoRing::submit_queued(unsigned count) {
  unsigned left = count;
  int busy = 0, number = 0;
  while (left > 0) {
    const int taken = enter(ring_, left, 0, 0, nullptr, 0);
    if (taken > 0) {
      left -= static_cast<unsigned>(taken);
      continue;
    }
    number = taken < 0 ? errno : EAGAIN;
    const bool is_transient = number == EAGAIN || number == EBUSY || number == EINTR;
    if (!is_transient || ++busy > MAX_BUSY) break;
    sched_yield();
  }
  if (left > 0) {
    __atomic_store_n(sq_tail_, *sq_tail_ - left, __ATOMIC_RELEASE);
    in_flight_ -= left;
    if (left == count) fail(number, "io_uring_enter");
  }
  return count - left;
}

void IoRing::drain(std::vector<Event>& events) {
  unsigned head = *cq_head_;
  const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
  in_flight_ -= tail - head;
  for (; head != tail; head++) events.push_back({cqes_[head & cq_mask_].user_data, cqes_[head & cq_mask_].res});
  __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
}

std::vector<Event> IoRing::reap(unsigned at_least, double timeout_s) {
  using Clock = std::chrono::steady_clock;
  std::lock_guard lock(reap_mutex_);
  std::vector<Event> events;
  drain(events);
  const auto end = Clock::now() + std::chrono::duration<double>(timeout_s);
  while (events.size() < at_least) {
    const double left_s = std::chrono::duration<double>(end - Clock::now()).count();
    if (left_s <= 0) break;
    __kernel_timespec time{};
    time.tv_sec = static_cast<int64_t>(left_s);
    time.tv_nsec = static_cast<int64_t>((left_s - static_cast<double>(time.tv_sec)) * 1e9);
    io_uring_getevents_arg arg{};
    arg.ts = reinterpret_cast<uint64_t>(&time);
    const unsigned flags = IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG;
    const unsigned missing = at_least - static_cast<unsigned>(events.size());
    const int result = enter(ring_, 0, missing, flags, &arg, sizeof arg);
    const int number = result < 0 ? errno : 0;
    drain(events);
    if (number == EINTR || number == ETIME) break;
    if (number != 0 && number != EAGAIN && number != EBUSY) fail(number, "io_uring_enter");
  }
  return events;
}

}  // namespace ms

#else

namespace ms {

IoRing::IoRing(int, unsigned, bool, bool) {
  throw std::system_error(ENOSYS, std::generic_category(), "built without <linux/io_uring.h>");
}
IoRing::~IoRing() = default;
void IoRing::register_buffers(std::vector<Region>) {}
size_t IoRing::submit(const std::vector<Operation>&) { return 0; }
std::vector<Event> IoRing::reap(unsigned, double) { return {}; }

}  // namespace ms

#endif
