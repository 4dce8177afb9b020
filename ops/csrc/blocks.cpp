#include "blocks.h"

#include <unistd.h>

#include <cerrno>
#include <deque>
#include <system_error>
#include <vector>

#include "checksum.h"

namespace ms {
namespace {

constexpr size_t SUBMIT_TOGETHER = 16;  // the disk works on some while others are prepared
constexpr size_t SECTOR = 4096;
constexpr int MAX_TRIES = 100;
constexpr double REAP_S = 1.0;
constexpr useconds_t REST_US = 100000;

class Transfers {
 public:
  Transfers(IoRing& ring, const Blocks& blocks)
      : ring_(ring), blocks_(blocks), done_(blocks.count), tries_(blocks.count) {}

  int run() {
    while (in_flight_ > 0 || wants_to_submit()) {
      if (wants_to_submit() && has_room()) submit();
      reap(wants_to_submit() && has_room() ? 0 : 1);
    }
    return error_;
  }

 private:
  bool wants_to_submit() const { return error_ == 0 && (next_ < blocks_.count || !again_.empty()); }
  bool has_room() const { return in_flight_ + SUBMIT_TOGETHER <= ring_.depth() || in_flight_ == 0; }

  void submit() {
    std::vector<Operation> batch;
    while (batch.size() < SUBMIT_TOGETHER && !again_.empty()) {
      batch.push_back(operation(again_.front()));
      again_.pop_front();
    }
    while (batch.size() < SUBMIT_TOGETHER && next_ < blocks_.count) {
      if (blocks_.is_write) note_sum(next_);
      batch.push_back(operation(next_++));
    }
    size_t taken = 0;
    try {
      taken = ring_.submit(batch);
    } catch (const std::system_error& refused) {
      error_ = refused.code().value();
    }
    in_flight_ += taken;
    for (size_t i = batch.size(); i > taken; i--) again_.push_front(batch[i - 1].tag);
  }

  Operation operation(size_t block) const {
    const size_t done = done_[block];
    return {block, blocks_.is_write, static_cast<uintptr_t>(blocks_.addresses[block]) + done,
            static_cast<uint32_t>(blocks_.length - done), static_cast<uint64_t>(blocks_.offsets[block]) + done};
  }

  void reap(unsigned at_least) {
    if (in_flight_ == 0) return;
    try {
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
};

}  // namespace

int transfer_blocks(IoRing& ring, const Blocks& blocks) { return Transfers(ring, blocks).run(); }

}  // namespace ms
