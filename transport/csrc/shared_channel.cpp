#include "shared_channel.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "crc32c.h"

namespace ms {

SharedChannel::SharedChannel(std::shared_ptr<Memory> own, std::shared_ptr<Memory> peers, std::shared_ptr<Link> link)
    : Channel(std::move(link)),
      own_(std::move(own)),
      peers_(std::move(peers)),
      outbox_(peers_->window_bytes()),
      inbox_(own_->window_bytes()) {
  link_->set_sleeper(own_);
}

void SharedChannel::free_memory() {
  link_->set_sleeper(nullptr);
  own_.reset();
  peers_.reset();
}

uint64_t SharedChannel::send(const Segments& segments, size_t bytes, int64_t deadline_ns) {
  size_t offset = 0;
  const auto has_room = [&] {
    outbox_.set_consumed(own_->header().consumed.load(std::memory_order_acquire));
    return outbox_.find_room(bytes, offset);
  };
  const bool found = wait(deadline_ns, has_room, [&](int64_t until) { sleep(until, true); });
  if (link_->is_over()) throw_lost();
  if (!found) throw TimedOut("the peer's window is full");
  const uint32_t crc = gather(peers_->payload() + offset, segments);
  const Descriptor made = outbox_.add(offset, bytes, crc, 0);
  publish(peers_->slot(made.number), made);
  wake_peer();
  return made.number;
}

bool SharedChannel::has_arrived() const {
  const uint64_t number = number_in(own_->slot(inbox_.next()));
  if (number == inbox_.next()) return true;
  const uint64_t before = inbox_.next() > NUM_SLOTS ? inbox_.next() - NUM_SLOTS : 0;
  if (number != before)
    throw CorruptMessage("message " + std::to_string(number) + " where " + std::to_string(inbox_.next()) + " is due");
  return false;
}

std::optional<Message> SharedChannel::receive(int64_t deadline_ns) {
  if (!wait(deadline_ns, [&] { return has_arrived(); }, [&](int64_t until) { sleep(until, false); })) return {};
  const Descriptor descriptor = own_->slot(inbox_.next());  // ours: the peer can still write there
  inbox_.check(descriptor);
  const uint8_t* data = own_->payload() + descriptor.offset;
  if (crc32c(0, data, descriptor.length) != descriptor.payload_crc)
    throw CorruptMessage("message " + std::to_string(inbox_.next()) + " does not fit its checksum");
  inbox_.take(descriptor);
  return Message{reinterpret_cast<uintptr_t>(data), descriptor.length, descriptor.number};
}

void SharedChannel::give_back(uint64_t number) {
  inbox_.release(number);
  // A store costs nothing, so it is always told.
  peers_->header().consumed.store(inbox_.tell(), std::memory_order_release);
  wake_peer();
}

void SharedChannel::wake_peer() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (peers_->header().is_asleep.load(std::memory_order_relaxed)) peers_->wake();
}

bool SharedChannel::is_due(bool for_room) const {
  if (for_room) return own_->header().consumed.load() != outbox_.num_consumed();
  return number_in(own_->slot(inbox_.next())) == inbox_.next();
}

void SharedChannel::sleep(int64_t deadline_ns, bool for_room) {
  constexpr int64_t AT_MOST_NS = 100'000'000;
  Header& header = own_->header();
  header.is_asleep.store(1);
  const uint32_t num_wakes = header.num_wakes.load();
  if (!is_due(for_room) && !link_->is_over()) {
    const int64_t ns = std::clamp<int64_t>(deadline_ns - now_ns(), 0, AT_MOST_NS);
    const timespec time{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
    syscall(SYS_futex, &header.num_wakes, FUTEX_WAIT, num_wakes, &time, nullptr, 0);
  }
  header.is_asleep.store(0);
}

}  // namespace ms
