// A persistent team of threads for one parallel loop at a time.
//
// Tasks are taken from a shared counter, so a thread that the system has put aside does not hold
// up the others' work. Helpers spin for a short while after a loop, because a model's step is a
// row of loops, then sleep. A caller that finds the team busy (another engine in the process)
// does its loop alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace ms {

class Team {
 public:
  // The process's team. Never destroyed: helpers may be waiting in it when the process ends.
  static Team& get();

  // Threads that work on a loop, the caller included; at most the processors this process may use.
  int size() const { return size_.load(std::memory_order_relaxed); }
  void resize(int size);

  // body(context, task) for every task in 0..tasks-1, in any order, on any thread. A body must not
  // throw: half a loop cannot be taken back, so the process ends with a message instead.
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
  std::mutex busy_;  // held by the one caller whose loop the team runs

  // One loop. Written while closed_, when no helper is active_; read by helpers that are.
  void (*body_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int tasks_ = 0;

  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<int> active_{0};  // helpers inside a loop
  std::atomic<bool> closed_{true};
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleeping_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
};

}  // namespace ms
