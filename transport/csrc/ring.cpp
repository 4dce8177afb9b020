#include "ring.h"

#include <stdexcept>
#include <string>

#include "crc32c.h"
#include "errors.h"

namespace ms {
namespace {

// An empty message takes room too, since two equal positions mean a full ring.
size_t padded(size_t bytes) {
  return bytes == 0 ? PAYLOAD_ALIGNMENT : (bytes + PAYLOAD_ALIGNMENT - 1) / PAYLOAD_ALIGNMENT * PAYLOAD_ALIGNMENT;
}

}  // namespace

uint32_t Descriptor::crc() const {
  const uint64_t fields[] = {offset, length, consumed, payload_crc, number};
  return crc32c(0, fields, sizeof fields);
}

bool Outbox::find_room(size_t bytes, size_t& offset) const {
  const uint64_t in_flight = num_sent_ - num_consumed_;
  if (in_flight == NUM_SLOTS) return false;
  bytes = padded(bytes);
  if (in_flight == 0) {  // begin at the start again, whose lines are in the caches
    offset = 0;
    return bytes <= window_bytes_;
  }
  const size_t begin = begins_[(num_consumed_ + 1) % NUM_SLOTS];
  const bool is_wrapped = end_ <= begin;
  if (is_wrapped) {
    offset = end_;
    return bytes <= begin - end_;
  }
  if (bytes <= window_bytes_ - end_) {
    offset = end_;
    return true;
  }
  offset = 0;
  return bytes <= begin;
}

Descriptor Outbox::add(size_t offset, size_t bytes, uint32_t payload_crc, uint64_t consumed) {
  num_sent_++;
  begins_[num_sent_ % NUM_SLOTS] = offset;
  end_ = offset + padded(bytes);
  Descriptor made{offset, bytes, consumed, payload_crc, 0, num_sent_, {}};
  made.head_crc = made.crc();
  return made;
}

void Outbox::set_consumed(uint64_t consumed) {
  if (consumed > num_sent_)
    throw CorruptMessage("the peer says it has " + std::to_string(consumed) + " messages of " +
                         std::to_string(num_sent_));
  if (consumed > num_consumed_) num_consumed_ = consumed;
}

void Inbox::check(const Descriptor& descriptor) const {
  const uint64_t number = descriptor.number;
  if (descriptor.head_crc != descriptor.crc())
    throw CorruptMessage("the head of message " + std::to_string(next()) + " does not fit its checksum");
  if (number != next())
    throw CorruptMessage("message " + std::to_string(number) + " where " + std::to_string(next()) + " is due");
  if (next() - num_consumed_ > NUM_SLOTS) throw CorruptMessage("more messages than slots");
  if (descriptor.length > window_bytes_ / 4 || descriptor.offset > window_bytes_ - descriptor.length ||
      descriptor.offset % PAYLOAD_ALIGNMENT != 0)
    throw CorruptMessage("message " + std::to_string(number) + ": " + std::to_string(descriptor.length) +
                         " bytes at " + std::to_string(descriptor.offset) + " are not in the window");
}

void Inbox::take(const Descriptor& descriptor) {
  num_taken_++;
  is_released_[num_taken_ % NUM_SLOTS] = false;
  bytes_[num_taken_ % NUM_SLOTS] = padded(descriptor.length);
}

void Inbox::release(uint64_t number) {
  if (number <= num_consumed_ || number > num_taken_ || is_released_[number % NUM_SLOTS])
    throw std::invalid_argument("message " + std::to_string(number) + " is not held");
  is_released_[number % NUM_SLOTS] = true;
  num_released_++;
  while (num_consumed_ < num_taken_ && is_released_[(num_consumed_ + 1) % NUM_SLOTS])
    uncredited_bytes_ += bytes_[++num_consumed_ % NUM_SLOTS];
}

bool Inbox::is_credit_due() const {
  return num_consumed_ - num_credited_ >= NUM_SLOTS / 2 || uncredited_bytes_ >= window_bytes_ / 2;
}

uint64_t Inbox::take_credit() {
  num_credited_ = num_consumed_;
  uncredited_bytes_ = 0;
  return num_consumed_;
}

bool Ring::find_room(size_t bytes, size_t& offset) {
  outbox.set_consumed(header().consumed.load(std::memory_order_acquire));
  return outbox.find_room(bytes, offset);
}

bool Ring::has_arrived() const {
  const uint64_t number = number_in(due()), next = inbox.next();
  if (number == next) return true;
  if (number != (next > NUM_SLOTS ? next - NUM_SLOTS : 0))
    throw CorruptMessage("message " + std::to_string(number) + " where " + std::to_string(next) + " is due");
  return false;
}

Message Ring::take() {
  const Descriptor descriptor = due();  // a copy: the peer can still write there
  inbox.check(descriptor);
  outbox.set_consumed(descriptor.consumed);
  const uint8_t* data = window_ + PAYLOAD_AT + descriptor.offset;
  if (crc32c(0, data, descriptor.length) != descriptor.payload_crc)
    throw CorruptMessage("message " + std::to_string(inbox.next()) + " does not fit its checksum");
  inbox.take(descriptor);
  return {reinterpret_cast<uintptr_t>(data), descriptor.length, descriptor.number};
}

}  // namespace ms
