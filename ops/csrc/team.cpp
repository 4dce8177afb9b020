#include "team.h"

#include <chrono>
#include <system_error>
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace ms {
namespace {

// Covers the Python code between two loops of a step, and usually that between two steps.
constexpr auto SPIN = std::chrono::microseconds(150);

constexpr int64_t MILLISECOND = 1'000'000;  // in ns, as all times of a host
constexpr int64_t SLICE = 2 * MILLISECOND, PAUSE = 38 * MILLISECOND;
// Between two steps of a prompt no guest begins, and the pause goes on.
constexpr int64_t GAP = MILLISECOND;
constexpr int64_t GUEST_TASK = 32'000'000;  // multiplications that take about 1 ms

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int usable_processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  const int n = static_cast<int>(std::thread::hardware_concurrency());
  return n > 0 ? n : 1;
}

}  // namespace

namespace {
std::atomic<Team*> instance{nullptr};
std::mutex creating;
thread_local Guest* guest = nullptr;
}  // namespace

void Host::begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t now = now_ns();
  if (!is_busy_.load() && now - ended_ns_ > GAP) began_ns_ = now;
  is_busy_.store(true);
}

void Host::end() {
  if (!is_busy_.load()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  ended_ns_ = now_ns();
  is_busy_.store(false);
  changed_.notify_all();
}

void Host::wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

bool Host::admit(const std::atomic<bool>& has_ended) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!has_ended.load()) {
    const int64_t now = now_ns();
    const bool is_busy = is_busy_.load();
    if (!is_busy && now >= ended_ns_ + GAP) {
      last_ns_ = now;
      return true;
    }
    if (now < slice_end_ns_) return true;
    int64_t until = (last_ns_ > began_ns_ ? last_ns_ : began_ns_) + PAUSE;
    if (now >= until) {
      slice_end_ns_ = last_ns_ = now + SLICE;
      return true;
    }
    if (!is_busy && ended_ns_ + GAP < until) until = ended_ns_ + GAP;
    changed_.wait_for(lock, std::chrono::nanoseconds(until - now));
  }
  return false;
}

void Guest::enter() { guest = this; }

void Guest::leave() { guest = nullptr; }

void Guest::end() {
  has_ended_.store(true);
  host_.wake();
}

Team& Team::get() {
  Team* team = instance.load(std::memory_order_acquire);
  if (team) return *team;
  std::lock_guard<std::mutex> lock(creating);
  if (!(team = instance.load())) {
    team = new Team(usable_processors());
    instance.store(team, std::memory_order_release);
#if defined(__linux__)
    pthread_atfork(nullptr, nullptr, &Team::replace_in_child);
#endif
  }
  return *team;
}

// A forked child has none of the threads and may have the locks in any state. It leaves the old
// team untouched and starts with a team of one thread, which resize() can enlarge.
void Team::replace_in_child() { instance.store(new Team(1)); }

int Team::parts_for(int64_t multiplications) const {
  const int64_t tasks = multiplications / GUEST_TASK;
  return guest && tasks > 4 * size() ? static_cast<int>(tasks / 4 < 1 << 20 ? tasks / 4 : 1 << 20) : size();
}

Team::Team(int size) { start(size); }

void Team::start(int size) {
  stopping_ = false;
  try {
    for (int i = 1; i < size; i++) helpers_.emplace_back([this, seen = epoch_.load()] { help(seen); });
  } catch (const std::system_error&) {
    // The system allows no more threads; the team works with those it has.
  }
  size_ = static_cast<int>(helpers_.size()) + 1;
}

void Team::stop() {
  stopping_ = true;
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& helper : helpers_) helper.join();
  helpers_.clear();
}

void Team::resize(int size) {
  std::lock_guard<std::mutex> lock(busy_);
  const int most = usable_processors();
  size = size > most ? most : size;
  if (size == size_) return;
  stop();
  start(size);
}

void Team::work() {
  void (*body)(void*, int) = body_;
  void* context = context_;
  const int tasks = tasks_;
  for (int task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(context, task);
}

void Team::help(unsigned seen) {
  for (;;) {
    const auto until = std::chrono::steady_clock::now() + SPIN;
    for (int i = 0; epoch_.load(std::memory_order_acquire) == seen; i++) {
      relax();
      if (i % 64 == 63 && std::chrono::steady_clock::now() > until) {
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        sleeping_.fetch_add(1);
        wake_.wait(lock, [&] { return epoch_.load() != seen; });
        sleeping_.fetch_sub(1);
        break;
      }
    }
    seen = epoch_.load(std::memory_order_acquire);
    if (stopping_.load()) return;
    active_.fetch_add(1);  // from here on the caller waits for this helper, unless the loop is closed
    if (!closed_.load()) work();
    active_.fetch_sub(1);
  }
}

void Team::run(int tasks, void (*body)(void*, int), void* context) {
  std::unique_lock<std::mutex> mine(busy_, std::defer_lock);
  if (tasks <= 1 || guest || !mine.try_lock() || helpers_.empty()) {
    for (int task = 0; task < tasks && (!guest || guest->admit()); task++) body(context, task);
    return;
  }
  body_ = body;
  context_ = context;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  closed_.store(false);
  epoch_.fetch_add(1);  // sequentially consistent: it must come before the load of sleeping_
  if (sleeping_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    wake_.notify_all();
  }
  work();
  closed_.store(true);
  for (int i = 0; active_.load() > 0; i++) {
    relax();
    if (i % 1024 == 1023) std::this_thread::yield();
  }
}

}  // namespace ms
