#include "socket_channel.h"

#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "crc32c.h"

namespace ms {
namespace {

constexpr int64_t STALLED_NS = 2'000'000'000;

bool is_temporary(int number) { return number == EAGAIN || number == EWOULDBLOCK || number == EINTR; }

// Removes the first `bytes` bytes from the pieces that begin at `first`.
void advance(std::vector<iovec>& pieces, size_t& first, size_t bytes) {
  for (; first < pieces.size() && bytes >= pieces[first].iov_len; first++) bytes -= pieces[first].iov_len;
  if (first == pieces.size()) return;
  pieces[first].iov_base = static_cast<uint8_t*>(pieces[first].iov_base) + bytes;
  pieces[first].iov_len -= bytes;
}

}  // namespace

SocketChannel::SocketChannel(int data_fd, size_t own_window_bytes, size_t peer_window_bytes, std::shared_ptr<Link> link,
                             const std::optional<Secrets>& secrets)
    : Channel(std::move(link)),
      fd_(data_fd),
      event_fd_(link_->event_fd()),
      own_(std::make_shared<Memory>(own_window_bytes)),
      outbox_(peer_window_bytes),
      inbox_(own_window_bytes),
      stage_(STAGE_BYTES) {
  if (!secrets) return;
  reader_.emplace(secrets->receiving, secrets->records_per_key);
  writer_.emplace(secrets->sending, secrets->records_per_key);
}

void SocketChannel::free_memory() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
  own_.reset();
}

// ---- receiving

void SocketChannel::read_available() {
  if (corrupt_ || is_at_end_) return;
  try {
    while (reader_ ? read_record() : read_some()) {
    }
  } catch (const CorruptMessage& error) {
    corrupt_ = error;
  }
}

// Makes one recvmsg call and processes its bytes. Returns false if no more bytes are available now.
bool SocketChannel::read_some() {
  iovec pieces[2];
  int count = 0;
  size_t wanted = 0;
  if (is_in_frame_) {
    wanted = head_.length - num_received_;
    pieces[count++] = {own_->payload() + head_.offset + num_received_, wanted};
  }
  if (stage_begin_ == stage_end_) stage_begin_ = stage_end_ = 0;
  if (stage_begin_ > 0) {  // the stage has part of a head
    std::memmove(stage_.data(), stage_.data() + stage_begin_, stage_end_ - stage_begin_);
    stage_end_ -= stage_begin_;
    stage_begin_ = 0;
  }
  pieces[count++] = {stage_.data() + stage_end_, stage_.size() - stage_end_};
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = static_cast<size_t>(count);
  const ssize_t got = recvmsg(fd_, &message, MSG_DONTWAIT);
  if (got < 0 && is_temporary(errno)) return errno == EINTR;
  if (got <= 0) {
    is_at_end_ = true;
    return false;
  }
  read_ns_ = now_ns();
  const size_t direct = std::min(static_cast<size_t>(got), wanted);
  const size_t asked = wanted + pieces[count - 1].iov_len;
  stage_end_ += static_cast<size_t>(got) - direct;
  if (is_in_frame_) add_payload(direct);
  while (!is_in_frame_ && stage_end_ - stage_begin_ >= sizeof(Descriptor)) {
    Descriptor head;
    std::memcpy(&head, stage_.data() + stage_begin_, sizeof head);
    stage_begin_ += sizeof head;
    begin_frame(head);
    if (!is_in_frame_) continue;
    const size_t here = std::min<size_t>(stage_end_ - stage_begin_, head_.length);
    std::memcpy(own_->payload() + head_.offset, stage_.data() + stage_begin_, here);
    stage_begin_ += here;
    add_payload(here);
  }
  return static_cast<size_t>(got) == asked || is_in_frame_;
}

// As read_some() where the bytes come in encrypted records.
bool SocketChannel::read_record() {
  const iovec room = reader_->room();
  const ssize_t got = recv(fd_, room.iov_base, room.iov_len, MSG_DONTWAIT);
  if (got < 0 && is_temporary(errno)) return errno == EINTR;
  if (got <= 0) {
    is_at_end_ = true;
    return false;
  }
  read_ns_ = now_ns();
  reader_->add(static_cast<size_t>(got));
  while (const auto text = reader_->next()) take_text(static_cast<const uint8_t*>(text->iov_base), text->iov_len);
  return static_cast<size_t>(got) == room.iov_len || is_in_frame_;
}

void SocketChannel::take_text(const uint8_t* text, size_t bytes) {
  while (bytes > 0) {
    size_t taken;
    if (is_in_frame_) {
      taken = std::min<size_t>(bytes, head_.length - num_received_);
      std::memcpy(own_->payload() + head_.offset + num_received_, text, taken);
      add_payload(taken);
    } else {
      Descriptor head;
      taken = std::min(bytes, sizeof head - stage_end_);
      std::memcpy(stage_.data() + stage_end_, text, taken);
      stage_end_ += taken;
      if (stage_end_ == sizeof head) {
        std::memcpy(&head, stage_.data(), sizeof head);
        stage_end_ = 0;
        begin_frame(head);
        if (is_in_frame_) add_payload(0);  // it may be empty
      }
    }
    text += taken;
    bytes -= taken;
  }
}

void SocketChannel::begin_frame(const Descriptor& head) {
  if (head.number == 0) {
    if (head.head_crc != head.crc() || head.length != 0)
      throw CorruptMessage("a credit does not fit its checksum");
    outbox_.set_consumed(head.consumed);
    return;
  }
  inbox_.check(head);
  outbox_.set_consumed(head.consumed);
  head_ = head;
  num_received_ = 0;
  crc_ = 0;
  is_in_frame_ = true;
}

void SocketChannel::add_payload(size_t bytes) {
  crc_ = crc32c(crc_, own_->payload() + head_.offset + num_received_, bytes);
  num_received_ += bytes;
  if (num_received_ == head_.length) end_frame();
}

void SocketChannel::end_frame() {
  is_in_frame_ = false;
  if (crc_ != head_.payload_crc)
    throw CorruptMessage("message " + std::to_string(inbox_.next()) + " does not fit its checksum");
  const uint64_t number = inbox_.next();
  inbox_.take(head_);
  arrived_[num_arrived_++ % NUM_SLOTS] = {reinterpret_cast<uintptr_t>(own_->payload() + head_.offset), head_.length, number};
}

std::optional<Message> SocketChannel::receive(int64_t deadline_ns) {
  const auto has_arrived = [&] {
    if (num_polled_ == num_arrived_) read_available();
    return num_polled_ != num_arrived_ || corrupt_ || is_at_end_;
  };
  send_credit();
  wait(deadline_ns, has_arrived, [&](int64_t until) { sleep(until, false); });
  if (num_polled_ != num_arrived_) return arrived_[num_polled_++ % NUM_SLOTS];
  if (corrupt_) throw *corrupt_;
  if (is_at_end_) link_->end("the connection to the peer broke");
  check_stalled();
  return {};
}

void SocketChannel::check_stalled() const {
  const bool is_within = is_in_frame_ || (reader_ && reader_->is_within_record());
  if (is_within && now_ns() - read_ns_ > STALLED_NS) link_->end("the peer stopped within a message");
}

// ---- sending

// Sends the rest of a credit or record. Returns false if a part of it is still to be sent.
bool SocketChannel::flush() {
  while (rest_.iov_len > 0) {
    const ssize_t sent = ::send(fd_, rest_.iov_base, rest_.iov_len, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      rest_.iov_base = static_cast<uint8_t*>(rest_.iov_base) + sent;
      rest_.iov_len -= static_cast<size_t>(sent);
    } else if (!is_temporary(errno)) {
      is_at_end_ = true;
      rest_.iov_len = 0;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

// Sends a credit if one is due. Returns false if it is due but the socket is full.
bool SocketChannel::send_credit() {
  if (!flush()) return false;
  if (!inbox_.is_credit_due() || fd_ < 0) return true;
  credit_ = Descriptor{};
  credit_.consumed = inbox_.take_credit();
  credit_.head_crc = credit_.crc();
  rest_ = {&credit_, sizeof credit_};
  if (writer_) {
    writer_->add(reinterpret_cast<const uint8_t*>(&credit_), sizeof credit_);
    rest_ = writer_->seal();
  }
  return flush();
}

uint64_t SocketChannel::send(const Segments& segments, size_t bytes, int64_t deadline_ns) {
  size_t offset = 0;
  const auto has_room = [&] {
    if (!flush()) return false;
    if (outbox_.find_room(bytes, offset)) return true;
    read_available();
    return corrupt_ || is_at_end_ || outbox_.find_room(bytes, offset);
  };
  const bool found = wait(deadline_ns, has_room, [&](int64_t until) { sleep(until, rest_.iov_len > 0); });
  if (link_->is_over()) throw_lost();
  if (!found) throw TimedOut("the peer's window is full");
  if (corrupt_) throw *corrupt_;
  if (is_at_end_) {
    link_->end("the connection to the peer broke");
    throw_lost();
  }
  std::vector<iovec> pieces(1);
  Descriptor head;
  uint32_t crc;
  if (bytes <= COPIED_BYTES) {
    copied_.resize(sizeof head + bytes);
    crc = gather(copied_.data() + sizeof head, segments);
  } else {
    crc = crc32c(segments);
    for_each_run(segments, [&](const uint8_t* run, size_t size) { pieces.push_back({const_cast<uint8_t*>(run), size}); });
  }
  head = outbox_.add(offset, bytes, crc, inbox_.take_credit());
  pieces[0] = {&head, sizeof head};
  if (bytes <= COPIED_BYTES) {
    std::memcpy(copied_.data(), &head, sizeof head);
    pieces[0] = {copied_.data(), copied_.size()};
  }
  write_all(pieces, deadline_ns);
  return outbox_.num_sent();
}

// Sends some of the pieces. Returns false if the socket is full; the reason of another failure is
// then in is_at_end_.
bool SocketChannel::write_some(std::vector<iovec>& pieces, size_t& first) {
  msghdr message{};
  message.msg_iov = pieces.data() + first;
  message.msg_iovlen = std::min<size_t>(pieces.size() - first, IOV_MAX);
  const ssize_t sent = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent >= 0) advance(pieces, first, static_cast<size_t>(sent));
  if (sent >= 0 || errno == EINTR) return true;
  if (!is_temporary(errno)) is_at_end_ = true;
  return false;
}

// As write_some(), for one encrypted record.
bool SocketChannel::write_record(std::vector<iovec>& pieces, size_t& first) {
  if (!flush()) return false;
  if (is_at_end_) return false;
  while (first < pieces.size()) {
    const size_t taken = writer_->add(static_cast<const uint8_t*>(pieces[first].iov_base), pieces[first].iov_len);
    const bool is_full = taken < pieces[first].iov_len;
    advance(pieces, first, taken);
    if (is_full) break;
  }
  rest_ = writer_->seal();
  return flush() && !is_at_end_;
}

void SocketChannel::write_all(std::vector<iovec>& pieces, int64_t deadline_ns) {
  size_t first = 0;
  const auto is_sent = [&] {
    while (first < pieces.size() || rest_.iov_len > 0) {
      if (first < pieces.size() ? (writer_ ? write_record(pieces, first) : write_some(pieces, first)) : flush()) continue;
      read_available();
      return is_at_end_ || corrupt_;
    }
    return true;
  };
  // Waits at least 1 ms, enough for a peer that reads, since half a frame cannot be undone.
  const bool done = wait(std::max<int64_t>(deadline_ns, now_ns() + 1'000'000), is_sent, [&](int64_t until) { sleep(until, true); });
  if (done && first == pieces.size() && rest_.iov_len == 0 && !is_at_end_) return;
  if (corrupt_) throw *corrupt_;
  if (!done && !link_->is_over()) {
    link_->end("the peer did not take a message in time");
    throw TimedOut("the peer did not take a message in time");
  }
  link_->end("the connection to the peer broke");
  throw_lost();
}

void SocketChannel::sleep(int64_t deadline_ns, bool to_write) {
  constexpr int64_t AT_MOST_NS = 1'000'000'000;  // then a stalled peer is detected
  const int64_t ns = std::clamp<int64_t>(deadline_ns - now_ns(), 0, AT_MOST_NS);
  const timespec time{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  pollfd fds[2] = {{fd_, static_cast<short>(POLLIN | (to_write ? POLLOUT : 0)), 0}, {event_fd_, POLLIN, 0}};
  ppoll(fds, 2, &time, nullptr);
  check_stalled();
}

}  // namespace ms
