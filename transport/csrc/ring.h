// Accounting of a window: where the next message may be written, and which messages have arrived. All
// transports share it; it moves no bytes.
//
//   window = Header (a page) | NUM_SLOTS descriptors (a page) | payload ring of window_bytes
//
// The sender places each payload in one piece, which never wraps, and the descriptor of message n in
// slot n % NUM_SLOTS. The receiver frees messages in order; `consumed` is the number of freed ones.
// It sends this credit in every descriptor, and separately once half of the slots or of the ring is
// freed but not yet credited. A message is at most a quarter of the ring. Then the part of the ring
// that remains beside an uncredited half and a gap at the end always has room for a message in one
// piece, so that no sender waits forever.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ms {

constexpr size_t NUM_SLOTS = 64, PAYLOAD_ALIGNMENT = 64, PAGE = 4096;
constexpr size_t DESCRIPTORS_AT = PAGE, PAYLOAD_AT = 2 * PAGE;

// The first words of a window. The peer writes them, so the owner does not trust them.
struct Header {
  alignas(64) std::atomic<uint64_t> consumed;  // number of the owner's messages that the peer has freed
  alignas(64) std::atomic<uint32_t> is_asleep;  // set by an owner that must be woken
  std::atomic<uint32_t> num_wakes;              // the futex
};
static_assert(sizeof(Header) <= PAGE);

// Stands in a slot of a window and at the head of a frame on a stream.
struct alignas(64) Descriptor {
  uint64_t offset;  // in the payload ring
  uint64_t length;
  uint64_t consumed;  // number of the receiver's messages that the sender has freed
  uint32_t payload_crc;
  uint32_t head_crc;  // CRC of the other fields
  uint64_t number;    // written last; 0 means no message but only a credit
  uint64_t unused[3];

  uint32_t crc() const;
};
static_assert(sizeof(Descriptor) == 64);
// The bytes up to and including the number, without the unused fields.
constexpr size_t DESCRIPTOR_SENT_BYTES = 40;
static_assert(offsetof(Descriptor, number) + sizeof(uint64_t) == DESCRIPTOR_SENT_BYTES);
static_assert(NUM_SLOTS * sizeof(Descriptor) <= PAYLOAD_AT - DESCRIPTORS_AT);

// Loads the number in a slot that the peer writes. Its earlier writes are visible after this.
inline uint64_t number_in(const Descriptor& slot) { return __atomic_load_n(&slot.number, __ATOMIC_ACQUIRE); }
// Makes a message visible by storing its number after all other fields.
inline void publish(Descriptor& slot, const Descriptor& descriptor) {
  slot.offset = descriptor.offset;
  slot.length = descriptor.length;
  slot.consumed = descriptor.consumed;
  slot.payload_crc = descriptor.payload_crc;
  slot.head_crc = descriptor.head_crc;
  __atomic_store_n(&slot.number, descriptor.number, __ATOMIC_RELEASE);
}

class Outbox {
 public:
  explicit Outbox(size_t window_bytes) : window_bytes_(window_bytes) {}
  size_t max_message_bytes() const { return window_bytes_ / 4; }
  // Finds the offset of the next message in the ring. Returns false if there is no room now.
  bool find_room(size_t bytes, size_t& offset) const;
  // Adds the next message, which the caller must send, and returns its descriptor.
  Descriptor add(size_t offset, size_t bytes, uint32_t payload_crc, uint64_t consumed);
  // Sets how many messages the peer has freed; ignores an older number. Throws CorruptMessage if it
  // exceeds the number of sent messages.
  void set_consumed(uint64_t consumed);
  uint64_t num_sent() const { return num_sent_; }
  uint64_t num_consumed() const { return num_consumed_; }

 private:
  size_t window_bytes_;
  size_t end_ = 0;  // end of the newest message
  uint64_t num_sent_ = 0, num_consumed_ = 0;
  std::array<size_t, NUM_SLOTS> begins_{};
};

class Inbox {
 public:
  explicit Inbox(size_t window_bytes) : window_bytes_(window_bytes) {}
  uint64_t next() const { return num_taken_ + 1; }
  // Checks a private copy of the next message's descriptor. Throws CorruptMessage.
  void check(const Descriptor& descriptor) const;
  void take(const Descriptor& descriptor);
  // Frees a message. Throws std::invalid_argument if it is not taken or already released.
  void release(uint64_t number);
  bool is_credit_due() const;
  // Returns the credit to send to the peer and records it as sent.
  uint64_t take_credit();
  uint64_t num_held() const { return num_taken_ - num_released_; }

 private:
  size_t window_bytes_;
  uint64_t num_taken_ = 0, num_released_ = 0, num_consumed_ = 0, num_credited_ = 0;
  size_t uncredited_bytes_ = 0;
  std::array<bool, NUM_SLOTS> is_released_{};
  std::array<size_t, NUM_SLOTS> bytes_{};
};

struct Message {
  uintptr_t address;
  size_t num_bytes;
  uint64_t number;
};

// The accounting of one end of a connection, whose own window the peer writes directly.
class Ring {
 public:
  Ring(uint8_t* window, size_t window_bytes, size_t peer_window_bytes)
      : outbox(peer_window_bytes), inbox(window_bytes), window_(window) {}
  // As Outbox::find_room, after reading the peer's credit. Throws CorruptMessage.
  bool find_room(size_t bytes, size_t& offset);
  bool has_news() const { return header().consumed.load() > outbox.num_consumed(); }
  // Throws CorruptMessage if the slot has an impossible number.
  bool has_arrived() const;
  // The length that the arrived message states, not yet checked.
  size_t due_bytes() const { return due().length; }
  // Checks and returns the message that has arrived. Throws CorruptMessage.
  Message take();
  Header& header() const { return *reinterpret_cast<Header*>(window_); }

  Outbox outbox;
  Inbox inbox;

 private:
  const Descriptor& due() const {
    return reinterpret_cast<const Descriptor*>(window_ + DESCRIPTORS_AT)[inbox.next() % NUM_SLOTS];
  }
  uint8_t* window_;
};

}  // namespace ms
