// Whether the peer is alive. A link owns the control connection after the set-up: one thread of the
// process (not Python's: a busy interpreter delays nothing) sends a byte on all of them every
// HEARTBEAT and listens. End of file or silence end the link, and who waits on it is woken.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "memory.h"

namespace ms {

constexpr int64_t HEARTBEAT_NS = 250'000'000, LOST_AFTER_NS = 1'250'000'000;  // as in transport/base.py

int64_t now_ns();

class Link : public std::enable_shared_from_this<Link> {
 public:
  // Takes over a connected stream socket; -1: the peer is in this process and always heard.
  explicit Link(int control_fd);
  ~Link();
  // Two that end each other.
  static std::pair<std::shared_ptr<Link>, std::shared_ptr<Link>> make_pair();
  // Heartbeats begin.
  void watch();

  bool is_over() const { return is_over_.load(std::memory_order_acquire); }
  std::string reason() const;
  double silence_s() const;
  // No more: the first reason counts. The peer sees it too. From any thread.
  void end(const std::string& reason);
  // Readable as soon as the link is over. Made on the first call.
  int event_fd();
  // Whom to wake in a futex; null: nobody any more.
  void set_sleeper(std::shared_ptr<Memory> memory);

 private:
  friend class Monitor;
  void listen();  // takes what has come on the control connection
  void beat();
  // The peer, if it can be reached, hears of the end at once (RST). Heartbeats and the end of a stream
  // would wait for acknowledgements, which do not come where the connection is cut one way.
  void reset();
  int64_t deadline_ns() const;

  std::atomic<bool> is_over_{false};
  std::atomic<int64_t> heard_ns_;
  mutable std::mutex mutex_;  // the rest
  std::string reason_;
  const int pid_;
  int control_fd_, event_fd_ = -1, watched_by_ = -1;  // the monitor's epoll
  std::shared_ptr<Memory> sleeper_;
  std::weak_ptr<Link> other_;
};

}  // namespace ms
