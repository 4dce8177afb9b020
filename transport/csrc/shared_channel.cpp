#include "shared_channel.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace ms {

SharedChannel::SharedChannel(std::shared_ptr<Memory> own, std::shared_ptr<Memory> peers, std::shared_ptr<Link> link)
    : Channel(std::move(link)),
      own_(std::move(own)),
      peers_(std::move(peers)),
      ring_(own_->base(), own_->window_bytes(), peers_->window_bytes()) {
  link_->set_waiter(own_);
}

void SharedChannel::free_memory() {
  link_->set_waiter(nullptr);
  own_.reset();
  peers_.reset();
}

bool SharedChannel::is_quick_to_send(size_t bytes) {
  size_t offset;
  return ring_.find_room(bytes, offset);
}

bool SharedChannel::is_quick_to_receive() { return ring_.has_arrived() && ring_.due_bytes() <= QUICK_BYTES; }

uint64_t SharedChannel::send(const Segments& segments, size_t bytes, int64_t deadline_ns) {
  size_t offset = 0;
  const auto has_room = [&] { return ring_.find_room(bytes, offset); };
  const bool found = wait(deadline_ns, has_room, [&](int64_t until) { sleep(until, true); });
  if (link_->is_over()) throw_lost();
  if (!found) throw TimedOut("the peer's window is full");
  const uint32_t crc = gather(peers_->payload() + offset, segments);
  const Descriptor made = ring_.outbox.add(offset, bytes, crc, ring_.inbox.take_credit());
  publish(peers_->slot(made.number), made);
  wake_peer();
  return made.number;
}

std::optional<Message> SharedChannel::receive(int64_t deadline_ns) {
  if (!wait(deadline_ns, [&] { return ring_.has_arrived(); }, [&](int64_t until) { sleep(until, false); })) return {};
  return ring_.take();
}

void SharedChannel::return_credit() {
  // A store is cheap, so every release sends its credit.
  peers_->header().consumed.store(ring_.inbox.take_credit(), std::memory_order_release);
  wake_peer();
}

void SharedChannel::wake_peer() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (peers_->header().is_asleep.load(std::memory_order_relaxed)) peers_->wake();
}

void SharedChannel::sleep(int64_t deadline_ns, bool for_room) {
  constexpr int64_t AT_MOST_NS = 1'000'000'000;
  Header& header = own_->header();
  header.is_asleep.store(1);
  const uint32_t num_wakes = header.num_wakes.load();
  const bool is_due = for_room ? ring_.has_news() : ring_.has_arrived();
  if (!is_due && !link_->is_over()) {
    const int64_t ns = std::clamp<int64_t>(deadline_ns - now_ns(), 0, AT_MOST_NS);
    const timespec time{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
    syscall(SYS_futex, &header.num_wakes, FUTEX_WAIT, num_wakes, &time, nullptr, 0);
  }
  header.is_asleep.store(0);
}

}  // namespace ms
