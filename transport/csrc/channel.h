// One end of a connection, as transport/base.py describes it: the common part of all transports.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "errors.h"
#include "link.h"
#include "ring.h"
#include "segments.h"

namespace ms {

class Channel {
 public:
  explicit Channel(std::shared_ptr<Link> link) : link_(std::move(link)) {}
  static constexpr size_t QUICK_BYTES = 32768;  // copied and checked in about a microsecond

  virtual ~Channel() = default;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  virtual size_t max_message_bytes() const = 0;
  uint64_t post(const Segments& segments, double timeout_s);
  std::optional<Message> poll(double timeout_s);
  // As post() and poll() where the message is short and no wait is needed; otherwise they return
  // nothing.
  std::optional<uint64_t> post_at_once(const Segments& segments);
  std::optional<Message> poll_at_once();
  void release(uint64_t number);
  void close();

  bool is_lost() const { return link_->is_over(); }
  double silence_s() const { return link_->silence_s(); }
  double spin_s() const { return 1e-9 * static_cast<double>(spin_ns_); }
  void set_spin_s(double spin_s) { spin_ns_ = static_cast<int64_t>(spin_s * 1e9); }

 protected:
  virtual bool is_quick_to_send(size_t) { return false; }
  virtual bool is_quick_to_receive() { return false; }
  virtual uint64_t send(const Segments& segments, size_t bytes, int64_t deadline_ns) = 0;
  virtual std::optional<Message> receive(int64_t deadline_ns) = 0;
  virtual Inbox& inbox() = 0;
  virtual void return_credit() = 0;  // if it is due
  virtual void free_memory() = 0;

  [[noreturn]] void throw_lost() const { throw PeerLost(link_->reason()); }
  // Waits until ready(): spins for spin_ns_, then calls sleep(deadline_ns) repeatedly. Returns false
  // if the deadline passes or the link ends first.
  template <class Ready, class Sleep>
  bool wait(int64_t deadline_ns, Ready ready, Sleep sleep);

  const std::shared_ptr<Link> link_;

 private:
  // Counts the uses of the memory: one while the end is open, one per running operation and held frame.
  class Use;
  void end_uses(int uses);
  void check_size(size_t bytes) const;
  template <class Operation>
  auto guarded(Operation operation);
  template <class Operation>
  auto checked(Operation operation);

  std::atomic<int> num_uses_{1};
  std::atomic<bool> is_closed_{false};
  int64_t spin_ns_ = 30'000;
};

inline void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Ready, class Sleep>
bool Channel::wait(int64_t deadline_ns, Ready ready, Sleep sleep) {
  if (ready()) return true;
  if (deadline_ns <= 0) return false;
  const int64_t spin_end = std::min(now_ns() + spin_ns_, deadline_ns);
  while (!link_->is_over()) {
    for (int i = 0; i < 32; i++) {
      if (ready()) return true;
      spin_pause();
    }
    if (now_ns() >= spin_end) break;
  }
  while (!link_->is_over()) {
    if (now_ns() >= deadline_ns) return false;
    sleep(deadline_ns);
    if (ready()) return true;
  }
  return ready();  // a message may have arrived before the link ended
}

}  // namespace ms
