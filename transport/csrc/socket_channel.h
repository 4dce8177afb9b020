#pragma once

#include <sys/uio.h>

#include <array>
#include <vector>

#include "channel.h"
#include "records.h"
#include "ring.h"

namespace ms {

// A channel that emulates windows on a stream socket. A frame is a descriptor and its payload, which
// is received directly into the own window at the descriptor's offset. A thread that waits reads the
// socket, even while it waits to send, so that two peers that send at once do not block each other.
// With secrets the same bytes travel in encrypted records (records.h), in their order.
class SocketChannel final : public Channel {
 public:
  struct Secrets {
    std::string sending, receiving;
    uint64_t records_per_key;
  };
  // Takes over the socket and closes it at the end. If the constructor throws, the caller has it still.
  SocketChannel(int data_fd, size_t own_window_bytes, size_t peer_window_bytes, std::shared_ptr<Link> link,
                const std::optional<Secrets>& secrets);
  ~SocketChannel() override { free_memory(); }
  size_t max_message_bytes() const override { return outbox_.max_message_bytes(); }

 protected:
  uint64_t send(const Segments& segments, size_t bytes, int64_t deadline_ns) override;
  std::optional<Message> receive(int64_t deadline_ns) override;
  Inbox& inbox() override { return inbox_; }
  void return_credit() override { send_credit(); }
  void free_memory() override;

 private:
  static constexpr size_t STAGE_BYTES = 16384, COPIED_BYTES = 65536;

  void read_available();
  bool read_some();
  bool read_record();
  void take_text(const uint8_t* text, size_t bytes);
  void begin_frame(const Descriptor& head);
  void add_payload(size_t bytes);
  void end_frame();
  bool send_credit();
  bool flush();
  void write_all(std::vector<iovec>& pieces, int64_t deadline_ns);
  bool write_some(std::vector<iovec>& pieces, size_t& first);
  bool write_record(std::vector<iovec>& pieces, size_t& first);
  void sleep(int64_t deadline_ns, bool to_write);
  void check_stalled() const;

  int fd_, event_fd_;
  std::shared_ptr<Memory> own_;
  Outbox outbox_;
  Inbox inbox_;

  // State of receiving. The stage holds bytes that arrived beyond the current frame.
  std::vector<uint8_t> stage_;
  size_t stage_begin_ = 0, stage_end_ = 0;
  bool is_in_frame_ = false, is_at_end_ = false;
  std::optional<CorruptMessage> corrupt_;  // thrown after the earlier frames are taken
  Descriptor head_{};
  size_t num_received_ = 0;
  uint32_t crc_ = 0;
  int64_t read_ns_ = 0;
  std::array<Message, NUM_SLOTS> arrived_{};
  uint64_t num_arrived_ = 0, num_polled_ = 0;

  // State of sending: the rest of a credit or of a record, then a small frame copied into one piece.
  Descriptor credit_{};
  iovec rest_{};
  std::vector<uint8_t> copied_;

  std::optional<RecordReader> reader_;  // both or none
  std::optional<RecordWriter> writer_;
};

}  // namespace ms
