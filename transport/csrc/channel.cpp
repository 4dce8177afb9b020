#include "channel.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>

namespace ms {

class Channel::Use {
 public:
  explicit Use(Channel& channel) : channel_(channel) {
    channel_.num_uses_.fetch_add(1);
    if (channel_.is_closed_.load()) {
      channel_.end_uses(1);
      throw PeerLost("the connection is closed");
    }
  }
  // Takes over the use of a held frame.
  Use(Channel& channel, std::adopt_lock_t) : channel_(channel) {}
  ~Use() { channel_.end_uses(1); }

 private:
  Channel& channel_;
};

void Channel::end_uses(int uses) {
  if (num_uses_.fetch_sub(uses) == uses) free_memory();
}

namespace {

// Returns the deadline in ns of the monotonic clock, or 0 for no wait.
int64_t deadline_after(double timeout_s) {
  if (!(timeout_s > 0)) return 0;
  return now_ns() + static_cast<int64_t>(std::min(timeout_s, 1e6) * 1e9);
}

}  // namespace

// A corrupt message ends the connection, and so does an encryption that fails.
template <class Operation>
auto Channel::checked(Operation operation) {
  try {
    return operation();
  } catch (const CorruptMessage&) {
    link_->end("the peer's messages are corrupt");
    throw;
  } catch (const NoCrypto&) {
    link_->end("the encryption failed");
    throw;
  }
}

// Runs the operation while the memory is held.
template <class Operation>
auto Channel::guarded(Operation operation) {
  Use use(*this);
  return checked(operation);
}

void Channel::check_size(size_t bytes) const {
  if (bytes > max_message_bytes())
    throw std::invalid_argument("a message of " + std::to_string(bytes) + " bytes; the peer's window takes " +
                                std::to_string(max_message_bytes()));
}

uint64_t Channel::post(const Segments& segments, double timeout_s) {
  const size_t bytes = total_bytes(segments);
  check_size(bytes);
  return guarded([&] {
    if (link_->is_over()) throw_lost();
    return send(segments, bytes, deadline_after(timeout_s));
  });
}

std::optional<uint64_t> Channel::post_at_once(const Segments& segments) {
  const size_t bytes = total_bytes(segments);
  if (bytes > std::min(QUICK_BYTES, max_message_bytes())) return {};
  return guarded([&]() -> std::optional<uint64_t> {
    if (link_->is_over() || !is_quick_to_send(bytes)) return {};
    return send(segments, bytes, 0);
  });
}

std::optional<Message> Channel::poll(double timeout_s) {
  return guarded([&] {
    auto message = receive(deadline_after(timeout_s));
    if (message) num_uses_.fetch_add(1);
    if (!message && link_->is_over()) throw_lost();
    return message;
  });
}

std::optional<Message> Channel::poll_at_once() {
  return guarded([&]() -> std::optional<Message> {
    if (!is_quick_to_receive()) return {};
    auto message = receive(0);
    if (message) num_uses_.fetch_add(1);
    return message;
  });
}

void Channel::release(uint64_t number) {
  inbox().release(number);
  Use use(*this, std::adopt_lock);
  checked([&] { return_credit(); });
}

void Channel::close() {
  if (is_closed_.exchange(true)) return;
  link_->end("the connection is closed");
  end_uses(1);
}

}  // namespace ms
