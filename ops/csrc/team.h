// A persistent team of threads that runs one parallel loop at a time.
//
// Threads take tasks from a shared counter, so a descheduled thread does not delay the remaining
// tasks. Helpers spin for a short while after a loop, because a model's step is a series of loops,
// and then sleep. A caller that finds the team busy (with another engine of the process) runs its
// loop alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace ms {

class Team {
 public:
  // Returns the process's team. It is never destroyed, since helpers may wait in it at exit.
  static Team& get();

  // The number of threads, the caller included; at most the processors this process may use.
  int size() const { return size_.load(std::memory_order_relaxed); }
  void resize(int size);

  // From now on the calling thread runs its loops alone. It does not occupy the team then, so another
  // thread's loops never find it busy.
  static void leave();

  // Calls body(context, task) for every task in 0..tasks-1, in any order, on any thread. A body
  // must not throw: a half-finished loop cannot be undone, so parallel() ends the process instead.
  void run(int tasks, void (*body)(void*, int), void* context);

  template <class F>
  void parallel(int tasks, F&& f) {
    auto call = [](void* context, int task) noexcept { (*static_cast<F*>(context))(task); };
    run(tasks, call, &f);
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

 private:
  explicit Team(int size);
  static void replace_in_child();
  void start(int size);
  void stop();
  void help(unsigned seen);
  void work();

  std::vector<std::thread> helpers_;
  std::atomic<int> size_{1};
  std::mutex busy_;  // held by the caller whose loop is running

  // The current loop. Written while closed_ is set and no helper is active; read by active helpers.
  void (*body_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int tasks_ = 0;

  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<int> active_{0};  // number of helpers inside a loop
  std::atomic<bool> closed_{true};
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleeping_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
};

}  // namespace ms
