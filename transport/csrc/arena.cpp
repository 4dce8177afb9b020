#include "arena.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <stdexcept>
#include <string>
#include <system_error>

#include "channel.h"

namespace ms {
namespace {

constexpr uint64_t MAGIC = 0x616e65726173'6d;  // "msarena"
constexpr uint32_t VERSION = 1;
constexpr int64_t PAUSE_NS = 2'000;
constexpr int SEALS = F_SEAL_SHRINK | F_SEAL_GROW;

void* map_control(int fd) {
  void* at = mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of an arena");
  return at;
}

}  // namespace

int Arena::create_fd(size_t num_bytes, uint32_t num_ranks) {
  if (num_ranks < 1 || num_ranks > MAX_RANKS)
    throw std::invalid_argument("num_ranks must be 1 to " + std::to_string(MAX_RANKS));
  if (num_bytes < PAGE || num_bytes % PAGE != 0 || num_bytes > size_t{1} << 46)
    throw std::invalid_argument("num_bytes must be a multiple of 4096");
  const int fd = memfd_create("mergestep-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
  Control head{};
  head.magic = MAGIC;
  head.version = VERSION;
  head.num_ranks = num_ranks;
  head.num_bytes = num_bytes;
  if (ftruncate(fd, static_cast<off_t>(PAGE + num_bytes)) < 0 || fcntl(fd, F_ADD_SEALS, SEALS | F_SEAL_SEAL) < 0 ||
      pwrite(fd, &head, sizeof head, 0) != static_cast<ssize_t>(sizeof head)) {
    const int number = errno;
    close(fd);
    throw std::system_error(number, std::generic_category(), "a memfd for an arena");
  }
  return fd;
}

Arena::Arena(int fd, int rank) : rank_(rank) {
  struct stat status;
  const int seals = fcntl(fd, F_GET_SEALS);
  // A process that can shrink the arena could kill this one with SIGBUS.
  if (seals < 0 || (seals & SEALS) != SEALS) throw std::invalid_argument("no arena: the file is not a sealed memfd");
  if (fstat(fd, &status) < 0 || status.st_size < static_cast<off_t>(PAGE))
    throw std::invalid_argument("no arena: the file is too small");
  control_ = static_cast<Control*>(map_control(fd));
  num_bytes_ = control_->num_bytes;
  num_ranks_ = control_->num_ranks;
  std::string problem;
  if (control_->magic != MAGIC) {
    problem = "no arena: its magic number is another";
  } else if (control_->version != VERSION) {
    problem = "version " + std::to_string(control_->version) + " of an arena; this is " + std::to_string(VERSION);
  } else if (num_ranks_ < 1 || num_ranks_ > MAX_RANKS || num_bytes_ % PAGE != 0 ||
             static_cast<uint64_t>(status.st_size) - PAGE != num_bytes_) {
    problem = "no arena: its size is not what its control page says";
  } else if (rank != NO_RANK && (rank < 0 || static_cast<uint32_t>(rank) >= num_ranks_)) {
    problem = "rank " + std::to_string(rank) + " of an arena of " + std::to_string(num_ranks_) + " ranks";
  }
  if (!problem.empty()) {
    munmap(control_, PAGE);
    throw std::invalid_argument(problem);
  }
}

Arena::~Arena() { munmap(control_, PAGE); }

bool Arena::join(uint32_t generation) {
  generation_ = generation;
  count_ = 0;
  is_joined_ = false;
  if (rank_ == NO_RANK || is_over()) return false;
  Line& line = control_->lines[rank_];
  const uint64_t word = line.word.load(), next = uint64_t{generation} << 32;
  // A rank that has been in barriers of this generation and begins again would run past the others.
  if (word > next && word >> 32 == generation) return false;
  line.is_asleep.store(0);
  line.word.store(next);
  return is_joined_ = true;
}

bool Arena::arrive() {
  if (!is_joined_ || is_over()) return is_joined_ = false;
  Line& line = control_->lines[rank_];
  uint64_t word = uint64_t{generation_} << 32 | count_;
  const uint64_t next = uint64_t{generation_} << 32 | ++count_;
  // A process that was stopped while a successor took its rank must not disturb the successor.
  if (!line.word.compare_exchange_strong(word, next)) return is_joined_ = false;
  // The last one to arrive wakes those that sleep. Of two that arrive together, the second in the
  // order of these exchanges sees both.
  if (missing() == 0) wake();
  return true;
}

int64_t Arena::missing() const {
  int64_t set = 0;
  for (uint32_t r = 0; r < num_ranks_; r++) {
    const uint64_t word = control_->lines[r].word.load();
    const bool is_here = static_cast<uint32_t>(word >> 32) == generation_ &&
                         static_cast<int32_t>(static_cast<uint32_t>(word) - count_) >= 0;
    if (!is_here) set |= int64_t{1} << r;
  }
  return set;
}

int64_t Arena::wait(int64_t deadline_ns) {
  int64_t set = missing();
  if (set == 0) return 0;
  const int64_t began_ns = now_ns(), spin_end = std::min(began_ns + spin_ns_, deadline_ns);
  for (int64_t now = began_ns; now < spin_end; now = now_ns()) {
    for (int i = 0; i < 32; i++) {
      if ((set = missing()) == 0) return 0;
      spin_pause();
    }
    if (is_over()) return ABORTED;
    // The rank that is due may wait for this core.
    if (now - began_ns > PAUSE_NS) sched_yield();
  }
  while ((set = missing()) != 0) {
    if (is_over()) return ABORTED;
    if (now_ns() >= deadline_ns) return set;
    sleep(deadline_ns);
  }
  return 0;
}

void Arena::leave(int64_t began_ns, bool has_passed) {
  waited_ns_.fetch_add(now_ns() - began_ns, std::memory_order_relaxed);
  if (has_passed) {
    num_barriers_.fetch_add(1, std::memory_order_relaxed);
  } else {
    is_joined_ = false;
  }
}

void Arena::sleep(int64_t deadline_ns) {
  // A rank that dies between its arrival and the wake-up is noticed after this time.
  constexpr int64_t AT_MOST_NS = 20'000'000;
  Line& line = control_->lines[rank_];
  line.is_asleep.store(1);
  const uint32_t num_wakes = control_->num_wakes.load();
  if (missing() != 0 && !is_over()) {
    const int64_t ns = std::clamp<int64_t>(deadline_ns - now_ns(), 0, AT_MOST_NS);
    const timespec time{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
    syscall(SYS_futex, &control_->num_wakes, FUTEX_WAIT, num_wakes, &time, nullptr, 0);
  }
  line.is_asleep.store(0);
}

void Arena::wake() {
  bool is_any_asleep = false;
  for (uint32_t r = 0; r < num_ranks_; r++) is_any_asleep |= control_->lines[r].is_asleep.load() != 0;
  if (!is_any_asleep) return;
  control_->num_wakes.fetch_add(1);
  syscall(SYS_futex, &control_->num_wakes, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Arena::abort(uint32_t generation) {
  uint64_t state = uint64_t{generation} << 1;
  control_->state.compare_exchange_strong(state, state | 1);
  wake();
}

void Arena::reset(uint32_t generation) {
  control_->state.store(uint64_t{generation} << 1);
  wake();
}

}  // namespace ms
