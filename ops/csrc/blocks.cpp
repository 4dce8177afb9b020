#include "blocks.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <system_error>

#include "checksum.h"

#if !defined(FALLOC_FL_PUNCH_HOLE)
#define FALLOC_FL_KEEP_SIZE 1
#define FALLOC_FL_PUNCH_HOLE 2
#endif

namespace ms {
namespace {

constexpr size_t SUBMIT_TOGETHER = 16;  // the disk works on some while the memory of others is faulted in
constexpr size_t SECTOR = 4096;
constexpr int MAX_TRIES = 100;
constexpr double REAP_S = 1.0;
constexpr useconds_t REST_US = 100000;

class Transfers {
 public:
  Transfers(IoRing& ring, const Blocks& blocks) : ring_(ring), blocks_(blocks), done_(blocks.count), tries_(blocks.count) {}

  int run() {
    while (has_work()) {
      const bool has_started = error_ == 0 && submit();
      if (in_flight_ == 0 && !has_started && error_ == 0) sched_yield();
      if (in_flight_ > 0) reap();
    }
    return error_;
  }

 private:
  bool has_work() const {
    const bool has_more = next_ < blocks_.count || !again_.empty();
    return in_flight_ > 0 || (error_ == 0 && has_more);
  }

  // Submits the next blocks. Returns whether the kernel took one.
  bool submit() {
    std::vector<Operation> batch;
    while (batch.size() < SUBMIT_TOGETHER && !again_.empty()) {
      batch.push_back(operation(again_.front()));
      again_.pop_front();
    }
    while (batch.size() < SUBMIT_TOGETHER && next_ < blocks_.count) {
      if (blocks_.is_write) note_sum(next_);
      batch.push_back(operation(next_++));
    }
    if (batch.empty()) return false;
    size_t taken = 0;
    try {
      taken = ring_.submit(batch);
    } catch (const std::system_error& refused) {
      error_ = refused.code().value();
    }
    in_flight_ += taken;
    has_room_ = taken == batch.size();
    for (size_t i = batch.size(); i > taken; i--) again_.push_front(batch[i - 1].tag);
    return taken > 0;
  }

  Operation operation(size_t block) const {
    const size_t done = done_[block];
    return {block, blocks_.is_write, static_cast<uintptr_t>(blocks_.addresses[block]) + done,
            static_cast<uint32_t>(blocks_.length - done), static_cast<uint64_t>(blocks_.offsets[block]) + done};
  }

  void reap() {
    // More are submitted as soon as they have room.
    const bool has_more = error_ == 0 && (next_ < blocks_.count || !again_.empty());
    try {
      const unsigned at_least = has_more && has_room_ ? 0 : 1;
      for (const Event& event : ring_.reap(at_least, REAP_S)) finish(event.tag, event.result);
    } catch (const std::system_error&) {  // transfers may still run, so the call cannot end
      usleep(REST_US);
    }
  }

  void finish(size_t block, int result) {
    in_flight_--;
    if (result == -EINTR || result == -EAGAIN || (result == 0 && blocks_.is_write)) return retry(block);
    if (result <= 0) {
      if (error_ == 0) error_ = result < 0 ? -result : EIO;
      return;
    }
    // The rest must be aligned again, so part of a short transfer may be done twice.
    size_t gained = static_cast<size_t>(result);
    if (done_[block] + gained < blocks_.length) gained = gained / SECTOR * SECTOR;
    if (gained == 0) return retry(block);
    done_[block] += gained;
    tries_[block] = 0;
    if (done_[block] < blocks_.length)
      again_.push_back(block);
    else if (!blocks_.is_write)
      note_sum(block);
  }

  void retry(size_t block) {
    if (++tries_[block] <= MAX_TRIES)
      again_.push_back(block);
    else if (error_ == 0)
      error_ = EIO;
  }

  void note_sum(size_t block) {
    const auto* data = reinterpret_cast<const uint8_t*>(blocks_.addresses[block]);
    blocks_.sums[block] = static_cast<uint32_t>(checksum(data, blocks_.length));
  }

  IoRing& ring_;
  const Blocks& blocks_;
  std::vector<size_t> done_;  // bytes of each block
  std::vector<int> tries_;    // of each block without progress
  std::deque<size_t> again_;  // blocks to be submitted again
  size_t next_ = 0, in_flight_ = 0;
  int error_ = 0;
  bool has_room_ = true;  // whether the ring took all of the last batch
};

}  // namespace

int transfer_blocks(IoRing& ring, const Blocks& blocks) { return Transfers(ring, blocks).run(); }

int punch_blocks(int fd, const int64_t* offsets, size_t count, size_t length) {
  int error = 0;
  for (size_t i = 0; i < count;) {
    size_t end = i + 1;  // neighbours go in one call
    while (end < count && offsets[end] == offsets[end - 1] + static_cast<int64_t>(length)) end++;
    const auto size = static_cast<off_t>((end - i) * length);
    while (fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, offsets[i], size) != 0) {
      if (errno == EINTR) continue;
      if (error == 0) error = errno;
      break;
    }
    i = end;
  }
  return error;
}

}  // namespace ms
