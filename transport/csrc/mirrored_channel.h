#pragma once

#include "channel.h"
#include "ring.h"

namespace ms {

// Carries bytes into a window that is not mapped here. Offsets count from the window's start.
class Writer {
 public:
  virtual ~Writer() = default;
  // Copies a payload and then a descriptor from our mirror to the same places in the peer's window.
  virtual void write(size_t payload, size_t payload_bytes, size_t descriptor) = 0;
  // Copies the header's `consumed` in the same way. It does not throw; the other methods report errors.
  virtual void tell() = 0;
  // Returns how many messages the peer has written completely, as the device reports: memory may
  // show a descriptor before the payload that was sent ahead of it. Throws when the device reports
  // an error.
  virtual uint64_t num_arrived() = 0;
  // Sleeps until a message has arrived, timeout_s has passed or the link is over.
  virtual void sleep(double timeout_s) = 0;
};

// A channel that lays out messages in a mirror of the peer's window and writes them from there.
class MirroredChannel final : public Channel {
 public:
  // is_ordered: the peer's writes become visible in their order, so that the device need not be asked
  // what has arrived.
  MirroredChannel(std::shared_ptr<Memory> own, std::shared_ptr<Memory> mirror, std::shared_ptr<Link> link,
                  std::unique_ptr<Writer> writer, size_t max_message_bytes, bool is_ordered);
  ~MirroredChannel() override { free_memory(); }
  size_t max_message_bytes() const override { return max_message_bytes_; }

 protected:
  bool is_quick_to_send(size_t bytes) override;
  bool is_quick_to_receive() override { return has_arrived() && ring_.due_bytes() <= QUICK_BYTES; }
  uint64_t send(const Segments& segments, size_t bytes, int64_t deadline_ns) override;
  std::optional<Message> receive(int64_t deadline_ns) override;
  Inbox& inbox() override { return ring_.inbox; }
  void return_credit() override;
  void free_memory() override;

 private:
  bool has_arrived();
  void sleep(int64_t deadline_ns);

  std::shared_ptr<Memory> own_, mirror_;
  const std::unique_ptr<Writer> writer_;
  const size_t max_message_bytes_;
  const bool is_ordered_;
  Ring ring_;
  uint64_t num_arrived_ = 0;
  int64_t waiting_since_ns_ = 0, asked_ns_ = 0;
};

}  // namespace ms
