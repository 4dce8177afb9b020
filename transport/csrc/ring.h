// Who may write where in a window, and what has arrived. Shared by all transports; moves no bytes.
//
//   window = Header (a page) | NUM_SLOTS descriptors (a page) | payload ring of window_bytes
//
// The sender places each payload in one piece (it never wraps) and number n's descriptor in slot
// n % NUM_SLOTS. The receiver frees in order: `consumed` messages are done with. It says so in
// every descriptor it sends, and by itself once half of the slots or of the ring waits to be told.
// A message is at most a quarter of the ring: then what is free beside an untold half, and a gap
// left at the end, always has room for one in one piece, and nobody waits in vain.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ms {

constexpr size_t NUM_SLOTS = 64, PAYLOAD_ALIGNMENT = 64, PAGE = 4096;
constexpr size_t DESCRIPTORS_AT = PAGE, PAYLOAD_AT = 2 * PAGE;

// First words of a window. The owner trusts none of it.
struct Header {
  alignas(64) std::atomic<uint64_t> consumed;  // of the owner's messages, by the peer
  alignas(64) std::atomic<uint32_t> is_asleep;  // owner: wake me
  std::atomic<uint32_t> num_wakes;              // futex
};
static_assert(sizeof(Header) <= PAGE);

// In a slot of a window, and as the head of a frame on a stream.
struct alignas(64) Descriptor {
  uint64_t offset;  // in the payload ring
  uint64_t length;
  uint64_t consumed;  // by the sender, of the receiver's messages
  uint32_t payload_crc;
  uint32_t head_crc;  // of all other fields
  uint64_t number;    // written last; 0: no message, only `consumed`
  uint64_t unused[3];

  uint32_t crc() const;
};
static_assert(sizeof(Descriptor) == 64);
// Without what is unused, and ending with the number.
constexpr size_t DESCRIPTOR_SENT_BYTES = 40;
static_assert(offsetof(Descriptor, number) + sizeof(uint64_t) == DESCRIPTOR_SENT_BYTES);
static_assert(NUM_SLOTS * sizeof(Descriptor) <= PAYLOAD_AT - DESCRIPTORS_AT);

// The number in a slot that the peer writes. What it wrote before is seen after this.
inline uint64_t number_in(const Descriptor& slot) { return __atomic_load_n(&slot.number, __ATOMIC_ACQUIRE); }
// Makes a message visible: the number after all else.
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
  // Where in the ring the next message may lie; false: no room now.
  bool find_room(size_t bytes, size_t& offset) const;
  // The descriptor of the next message. It is sent after this.
  Descriptor add(size_t offset, size_t bytes, uint32_t payload_crc, uint64_t consumed);
  // The peer has freed so many; what is older than known is ignored. CorruptMessage: more than sent.
  void set_consumed(uint64_t consumed);
  uint64_t num_sent() const { return num_sent_; }
  uint64_t num_consumed() const { return num_consumed_; }

 private:
  size_t window_bytes_;
  size_t end_ = 0;  // of the newest message
  uint64_t num_sent_ = 0, num_consumed_ = 0;
  std::array<size_t, NUM_SLOTS> begins_{};
};

class Inbox {
 public:
  explicit Inbox(size_t window_bytes) : window_bytes_(window_bytes) {}
  uint64_t next() const { return num_taken_ + 1; }
  // A private copy of what claims to be the next message's. CorruptMessage.
  void check(const Descriptor& descriptor) const;
  void take(const Descriptor& descriptor);
  // std::invalid_argument: not taken, or released before.
  void release(uint64_t number);
  bool is_credit_due() const;
  // What to tell the peer; counts as told.
  uint64_t tell();
  uint64_t num_held() const { return num_taken_ - num_released_; }

 private:
  size_t window_bytes_;
  uint64_t num_taken_ = 0, num_released_ = 0, num_consumed_ = 0, num_told_ = 0;
  size_t untold_bytes_ = 0;
  std::array<bool, NUM_SLOTS> is_released_{};
  std::array<size_t, NUM_SLOTS> bytes_{};
};

struct Message {
  uintptr_t address;
  size_t num_bytes;
  uint64_t number;
};

// One end of a connection whose own window the peer writes by itself: its books, and what it sees.
class Ring {
 public:
  Ring(uint8_t* window, size_t window_bytes, size_t peer_window_bytes)
      : outbox(peer_window_bytes), inbox(window_bytes), window_(window) {}
  // Looks whether the peer has freed anything first. CorruptMessage.
  bool find_room(size_t bytes, size_t& offset);
  bool has_news() const { return header().consumed.load() > outbox.num_consumed(); }
  // CorruptMessage: a number that cannot be there.
  bool has_arrived() const;
  // Of the message that has arrived, as it says.
  size_t due_bytes() const { return due().length; }
  // The message that has arrived, checked. CorruptMessage.
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
