#include "link.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <vector>

namespace ms {
namespace {

constexpr char HEARTBEAT_BYTE = 'h';

}  // namespace

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

// The heartbeat thread of the process. It is never destroyed, since it may run until the process ends.
class Monitor {
 public:
  static Monitor& get() {
    static Monitor* monitor = nullptr;
    static pid_t pid = 0;
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    if (pid != getpid()) {  // a forked child has none of its parent's threads
      monitor = new Monitor();
      pid = getpid();
    }
    return *monitor;
  }

  int add(const std::shared_ptr<Link>& link, int fd) {
    std::lock_guard lock(mutex_);
    const uint64_t id = next_id_++;
    links_[id] = link;
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = id;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) < 0) {
      links_.erase(id);
      throw std::system_error(errno, std::generic_category(), "epoll_ctl");
    }
    return epoll_;
  }

 private:
  Monitor() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
    sigset_t all, before;  // the thread blocks all signals, so that Python's threads receive them
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([this] { run(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  std::vector<std::shared_ptr<Link>> live_links() {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Link>> found;
    for (auto it = links_.begin(); it != links_.end();) {
      auto link = it->second.lock();
      if (link && !link->is_over()) found.push_back(std::move(link)), ++it;
      else it = links_.erase(it);
    }
    return found;
  }

  void run() {
    pthread_setname_np(pthread_self(), "heartbeats");
    int64_t next_beat = 0;
    epoll_event events[64];
    for (;;) {
      int64_t due = next_beat;
      for (const auto& link : live_links()) due = std::min(due, link->deadline_ns());
      const int64_t wait_ms = std::clamp<int64_t>((due - now_ns()) / 1'000'000 + 1, 0, HEARTBEAT_NS / 1'000'000);
      const int count = epoll_wait(epoll_, events, 64, static_cast<int>(wait_ms));
      for (int i = 0; i < count; i++) {
        std::shared_ptr<Link> link;
        {
          std::lock_guard lock(mutex_);
          if (auto found = links_.find(events[i].data.u64); found != links_.end()) link = found->second.lock();
        }
        if (link) link->listen();
      }
      const int64_t now = now_ns();
      const auto links = live_links();
      for (const auto& link : links) {
        if (now < link->deadline_ns()) continue;
        link->listen();  // this thread may have been late itself
        if (now >= link->deadline_ns()) {
          link->reset();
          link->end("nothing was heard of the peer for too long");
        }
      }
      if (now < next_beat) continue;
      for (const auto& link : links) link->send_heartbeat();
      next_beat = now + HEARTBEAT_NS;
    }
  }

  const int epoll_;
  std::mutex mutex_;
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, std::weak_ptr<Link>> links_;
};

Link::Link(int control_fd) : heard_ns_(now_ns()), pid_(getpid()), control_fd_(control_fd) {}

Link::~Link() {
  end("closed");
  if (event_fd_ >= 0) close(event_fd_);
}

std::pair<std::shared_ptr<Link>, std::shared_ptr<Link>> Link::make_pair() {
  auto one = std::make_shared<Link>(-1), other = std::make_shared<Link>(-1);
  one->other_ = other;
  other->other_ = one;
  return {one, other};
}

void Link::watch() {
  heard_ns_ = now_ns();
  std::lock_guard lock(mutex_);
  if (control_fd_ >= 0) watched_by_ = Monitor::get().add(shared_from_this(), control_fd_);
}

std::string Link::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

int64_t Link::silence_ns() const {
  if (is_over()) return silence_ns_;
  return control_fd_ < 0 ? 0 : now_ns() - heard_ns_;
}

double Link::silence_s() const {
  std::lock_guard lock(mutex_);
  return 1e-9 * static_cast<double>(silence_ns());
}

void Link::end(const std::string& reason) {
  std::shared_ptr<Memory> waiter;
  std::shared_ptr<Link> other;
  {
    std::lock_guard lock(mutex_);
    if (is_over()) return;
    reason_ = reason;
    silence_ns_ = silence_ns();
    is_over_.store(true);
    const bool is_ours = pid_ == getpid();  // a forked process must not end its parent's connection
    if (control_fd_ >= 0) {
      if (is_ours && watched_by_ >= 0) epoll_ctl(watched_by_, EPOLL_CTL_DEL, control_fd_, nullptr);
      if (is_ours) shutdown(control_fd_, SHUT_RDWR);
      close(control_fd_);
      control_fd_ = -1;
    }
    if (is_ours && event_fd_ >= 0) eventfd_write(event_fd_, 1);
    waiter = std::move(waiter_);
    other = other_.lock();
  }
  if (waiter) waiter->wake();
  if (other) other->end("the peer closed the connection");
}

int Link::event_fd() {
  std::lock_guard lock(mutex_);
  if (event_fd_ < 0) {
    event_fd_ = eventfd(is_over() ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  return event_fd_;
}

void Link::set_waiter(std::shared_ptr<Memory> memory) {
  std::lock_guard lock(mutex_);
  if (!is_over() || !memory) waiter_ = std::move(memory);
}

int64_t Link::deadline_ns() const { return heard_ns_.load() + LOST_AFTER_NS; }

void Link::listen() {
  const char* reason = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (control_fd_ < 0) return;
    char bytes[256];
    const ssize_t got = recv(control_fd_, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got > 0) {
      heard_ns_ = now_ns();
      if (std::count(bytes, bytes + got, HEARTBEAT_BYTE) != got) reason = "the peer sent what is no heartbeat";
    } else if (got == 0) {
      reason = "the peer closed the connection";
    } else if (errno != EAGAIN && errno != EINTR) {
      reason = "the connection to the peer broke";
    }
  }
  if (reason) end(reason);
}

void Link::reset() {
  std::lock_guard lock(mutex_);
  const sockaddr unspecified{AF_UNSPEC, {}};
  if (control_fd_ >= 0) (void)!connect(control_fd_, &unspecified, sizeof unspecified);
}

void Link::send_heartbeat() {
  std::lock_guard lock(mutex_);
  // listen() detects a failure.
  if (control_fd_ >= 0) (void)!send(control_fd_, &HEARTBEAT_BYTE, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace ms
