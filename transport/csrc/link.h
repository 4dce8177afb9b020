// Detects whether the peer is alive. A link owns the control connection after the set-up. One native
// thread of the process, which a busy interpreter does not delay, sends a byte on all control
// connections every HEARTBEAT_NS and listens. End of file or silence ends the link and wakes threads
// that wait on it.
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
  // Takes over a connected stream socket; -1 means that the peer is in this process and sends no
  // heartbeats.
  explicit Link(int control_fd);
  ~Link();
  // Makes two links of which each ends the other.
  static std::pair<std::shared_ptr<Link>, std::shared_ptr<Link>> make_pair();
  // Starts heartbeats.
  void watch();

  bool is_over() const { return is_over_.load(std::memory_order_acquire); }
  std::string reason() const;
  // Returns how long nothing has been heard of the peer; once the link is over, until its end.
  double silence_s() const;
  // Ends the link, on both sides; the first reason counts. Any thread may call it.
  void end(const std::string& reason);
  // Returns a descriptor, made on the first call, that is readable as soon as the link is over.
  int event_fd();
  // Sets the memory whose futex waiters are woken at the end; null for none.
  void set_waiter(std::shared_ptr<Memory> memory);

 private:
  friend class Monitor;
  void listen();  // reads the control connection
  void send_heartbeat();
  // Tells a reachable peer of the end at once, by a RST. Heartbeats and the end of a stream would wait
  // for acknowledgements, which do not come where the connection is cut in one direction.
  void reset();
  int64_t deadline_ns() const;
  int64_t silence_ns() const;  // the caller holds the mutex

  std::atomic<bool> is_over_{false};
  std::atomic<int64_t> heard_ns_;
  mutable std::mutex mutex_;  // guards the members below
  std::string reason_;
  int64_t silence_ns_ = 0;  // when the link ended
  const int pid_;
  int control_fd_, event_fd_ = -1, watched_by_ = -1;  // the monitor's epoll
  std::shared_ptr<Memory> waiter_;
  std::weak_ptr<Link> other_;
};

}  // namespace ms
