// Memory that the ranks of one host share, and a barrier over it.
//
//   arena = control page | data of num_bytes
//
// Every rank has a word of its own, which it alone writes: the generation and the number of barriers
// that it has arrived at in it. A barrier waits until every rank's word has reached one's own. No
// lock lies in the shared memory, so that a rank may die at any point.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ring.h"

namespace ms {

class Arena {
 public:
  static constexpr uint32_t MAX_RANKS = 62;  // a line of the control page each
  static constexpr int NO_RANK = -1;         // of a process that only creates, aborts and resets
  static constexpr int64_t ABORTED = -1;

  // Creates a sealed memfd for an arena. Throws std::system_error.
  static int create_fd(size_t num_bytes, uint32_t num_ranks);
  // Maps the control page of a memfd, and leaves fd open. Throws std::invalid_argument if it is no
  // arena, or has no such rank.
  Arena(int fd, int rank);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Begins to count barriers from zero. Returns false if this is not the arena's generation, it is
  // aborted, or this rank has arrived at barriers of it before.
  bool join(uint32_t generation);
  // Arrives at the next barrier. Returns false if the generation is over, or another process has
  // this rank.
  bool arrive();
  // Waits for the other ranks until the deadline (ns of the monotonic clock). Returns 0 once all have
  // arrived, ABORTED, or the set of those that have not. A later call goes on with the same wait.
  int64_t wait(int64_t deadline_ns);
  // Ends the barrier, if wait() returned 0 or is given up; adds up the time.
  void leave(int64_t began_ns, bool has_passed);

  // Makes every barrier of a generation return at once, if it is not over yet.
  void abort(uint32_t generation);
  // Begins a generation, also after an abort.
  void reset(uint32_t generation);

  size_t num_bytes() const { return num_bytes_; }
  uint32_t num_ranks() const { return num_ranks_; }
  int rank() const { return rank_; }
  uint32_t generation() const { return static_cast<uint32_t>(control_->state.load() >> 1); }
  bool is_aborted() const { return control_->state.load() & 1; }
  double waited_s() const { return 1e-9 * static_cast<double>(waited_ns_.load(std::memory_order_relaxed)); }
  uint64_t num_barriers() const { return num_barriers_.load(std::memory_order_relaxed); }
  double spin_s() const { return 1e-9 * static_cast<double>(spin_ns_); }
  void set_spin_s(double spin_s) { spin_ns_ = static_cast<int64_t>(spin_s * 1e9); }

 private:
  // The word of a rank is generation << 32 | count.
  struct alignas(64) Line {
    std::atomic<uint64_t> word;
    std::atomic<uint32_t> is_asleep;
  };
  struct Control {
    uint64_t magic;
    uint32_t version, num_ranks;
    uint64_t num_bytes;
    alignas(64) std::atomic<uint64_t> state;  // generation << 1 | is_aborted
    std::atomic<uint32_t> num_wakes;          // the futex
    Line lines[MAX_RANKS];
  };
  static_assert(sizeof(Control) <= PAGE);

  bool is_over() const { return control_->state.load() != uint64_t{generation_} << 1; }
  int64_t missing() const;
  void sleep(int64_t deadline_ns);
  void wake();

  Control* control_;
  size_t num_bytes_;
  uint32_t num_ranks_;
  int rank_;
  bool is_joined_ = false;
  uint32_t generation_ = 0, count_ = 0;
  std::atomic<int64_t> waited_ns_{0};
  std::atomic<uint64_t> num_barriers_{0};
  int64_t spin_ns_ = 20'000;
};

}  // namespace ms
