// A persistent team of threads that runs one parallel loop at a time.
//
// Threads take tasks from a shared counter, so a descheduled thread does not delay the remaining
// tasks. Helpers spin for a short while after a loop, because a model's step is a series of loops,
// and then sleep. A caller that finds the team busy (with another engine of the process) runs its
// loop alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace ms {

// A process that computes for others, its guests, beside its own work. While it computes a prompt of
// its own, guests get 2 ms in 40.
class Host {
 public:
  // The process begins or ends a step with a prompt. One thread calls both.
  void begin();
  void end();

  // Waits until a guest may run a task; returns false if it has ended. Guests share the time.
  bool admit(const std::atomic<bool>& has_ended);
  void wake();

 private:
  std::atomic<bool> is_busy_{false};
  std::mutex mutex_;  // of what follows
  int64_t last_ns_ = 0;  // when a guest computed last
  int64_t began_ns_ = 0, ended_ns_ = 0, slice_end_ns_ = 0;
  std::condition_variable changed_;
};

// One guest, whose loops run in one thread alone. It can be ended between two tasks of a loop.
class Guest {
 public:
  explicit Guest(Host& host) : host_(host) {}
  // The calling thread's loops are this guest's from now on, or those of none. A guest's loops never
  // occupy the team, so those of the process do not find it busy.
  void enter();
  static void leave();

  bool admit() { return !has_ended() && host_.admit(has_ended_); }
  // Any thread. A loop that is running leaves out its remaining tasks, so what it computes is void.
  void end();
  bool has_ended() const { return has_ended_.load(std::memory_order_relaxed); }

  Guest(const Guest&) = delete;
  Guest& operator=(const Guest&) = delete;

 private:
  Host& host_;
  std::atomic<bool> has_ended_{false};
};

class Team {
 public:
  // Returns the process's team. It is never destroyed, since helpers may wait in it at exit.
  static Team& get();

  // The number of threads, the caller included; at most the processors this process may use.
  int size() const { return size_.load(std::memory_order_relaxed); }
  void resize(int size);

  // For how many threads to divide so many multiplications: a guest's tasks should take about 1 ms.
  int parts_for(int64_t multiplications) const;

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
