#include "mirrored_channel.h"

#include <sched.h>
#include <time.h>

#include <algorithm>

namespace ms {
namespace {

// A waiting thread yields its CPU at once: the other end, or the kernel's part of a software device,
// may need it. After YIELD_NS it sleeps between two polls.
constexpr int64_t YIELD_NS = 2'000'000, NAP_NS = 50'000;
// The interval at which the device is asked for errors while memory is polled.
constexpr int64_t ASK_NS = 10'000'000;

}  // namespace

MirroredChannel::MirroredChannel(std::shared_ptr<Memory> own, std::shared_ptr<Memory> mirror,
                                 std::shared_ptr<Link> link, std::unique_ptr<Writer> writer,
                                 size_t max_message_bytes, bool is_ordered)
    : Channel(std::move(link)),
      own_(std::move(own)),
      mirror_(std::move(mirror)),
      writer_(std::move(writer)),
      max_message_bytes_(std::min(max_message_bytes, mirror_->window_bytes() / 4)),
      is_ordered_(is_ordered),
      ring_(own_->base(), own_->window_bytes(), mirror_->window_bytes()) {}

void MirroredChannel::free_memory() {
  own_.reset();
  mirror_.reset();
}

bool MirroredChannel::is_quick_to_send(size_t bytes) {
  size_t offset;
  return ring_.find_room(bytes, offset);
}

uint64_t MirroredChannel::send(const Segments& segments, size_t bytes, int64_t deadline_ns) {
  waiting_since_ns_ = now_ns();
  size_t offset = 0;
  const auto has_room = [&] { return ring_.find_room(bytes, offset); };
  const bool found = wait(deadline_ns, has_room, [&](int64_t until) { sleep(until); });
  if (link_->is_over()) throw_lost();
  if (!found) throw TimedOut("the peer's window is full");
  const uint32_t crc = gather(mirror_->payload() + offset, segments);
  const Descriptor made = ring_.outbox.add(offset, bytes, crc, ring_.inbox.take_credit());
  mirror_->slot(made.number) = made;
  writer_->write(PAYLOAD_AT + offset, bytes, DESCRIPTORS_AT + made.number % NUM_SLOTS * sizeof made);
  return made.number;
}

bool MirroredChannel::has_arrived() {
  if (!ring_.has_arrived()) return false;
  if (is_ordered_) return true;
  if (num_arrived_ < ring_.inbox.next()) num_arrived_ = writer_->num_arrived();
  return num_arrived_ >= ring_.inbox.next();
}

std::optional<Message> MirroredChannel::receive(int64_t deadline_ns) {
  waiting_since_ns_ = now_ns();
  if (!wait(deadline_ns, [&] { return has_arrived(); }, [&](int64_t until) { sleep(until); })) return {};
  return ring_.take();
}

void MirroredChannel::return_credit() {
  if (!ring_.inbox.is_credit_due() || link_->is_over()) return;
  mirror_->header().consumed.store(ring_.inbox.take_credit(), std::memory_order_relaxed);
  writer_->tell();
}

void MirroredChannel::sleep(int64_t deadline_ns) {
  const int64_t now = now_ns();
  if (!is_ordered_) return writer_->sleep(1e-9 * static_cast<double>(std::max<int64_t>(deadline_ns - now, 0)));
  if (now - asked_ns_ > ASK_NS) {
    asked_ns_ = now;
    writer_->num_arrived();
  }
  if (now - waiting_since_ns_ < YIELD_NS) {
    sched_yield();
    return;
  }
  const timespec nap{0, static_cast<long>(std::clamp<int64_t>(deadline_ns - now, 0, NAP_NS))};
  nanosleep(&nap, nullptr);
}

}  // namespace ms
