#pragma once

#include "channel.h"
#include "ring.h"

namespace ms {

// A channel whose two windows are both mapped here; its ends are in one process or in two.
class SharedChannel final : public Channel {
 public:
  SharedChannel(std::shared_ptr<Memory> own, std::shared_ptr<Memory> peers, std::shared_ptr<Link> link);
  ~SharedChannel() override { free_memory(); }
  size_t max_message_bytes() const override { return ring_.outbox.max_message_bytes(); }

 protected:
  bool is_quick_to_send(size_t bytes) override;
  bool is_quick_to_receive() override;
  uint64_t send(const Segments& segments, size_t bytes, int64_t deadline_ns) override;
  std::optional<Message> receive(int64_t deadline_ns) override;
  Inbox& inbox() override { return ring_.inbox; }
  void return_credit() override;
  void free_memory() override;

 private:
  void sleep(int64_t deadline_ns, bool for_room);
  void wake_peer() const;

  std::shared_ptr<Memory> own_, peers_;
  Ring ring_;
};

}  // namespace ms
