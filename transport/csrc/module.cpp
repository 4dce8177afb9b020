// Binds windows and channels. Addresses and sizes are integers; the GIL is released while bytes are
// copied or waited for, unless they are few.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <system_error>

#include "arena.h"
#include "crc32c.h"
#include "mirrored_channel.h"
#include "python_writer.h"
#include "shared_channel.h"
#include "socket_channel.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace ms;

namespace {

constexpr size_t MAX_WINDOW_BYTES = size_t{1} << 32;

size_t integer(PyObject* object) {
  const size_t value = PyLong_AsSize_t(object);
  if (value == static_cast<size_t>(-1) && PyErr_Occurred()) throw nb::python_error();
  return value;
}

// Converts a sequence of transport.base.Segment, or of other tuples of four. By functions of Python's
// stable ABI only: the macros that read tuples in place are not part of it.
Segments segments_of(nb::handle given) {
  const auto all = nb::steal<nb::object>(PySequence_Tuple(given.ptr()));
  if (!all.is_valid()) throw nb::python_error();
  Segments segments(static_cast<size_t>(PyTuple_Size(all.ptr())));
  for (size_t i = 0; i < segments.size(); i++) {
    PyObject* item = PyTuple_GetItem(all.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyTuple_Check(item) || PyTuple_Size(item) != 4) throw nb::type_error("segments: not a Segment");
    const Py_ssize_t stride = PyLong_AsSsize_t(PyTuple_GetItem(item, 3));
    if (stride == -1 && PyErr_Occurred()) throw nb::python_error();
    segments[i] = {reinterpret_cast<const uint8_t*>(integer(PyTuple_GetItem(item, 0))),
                   integer(PyTuple_GetItem(item, 1)), integer(PyTuple_GetItem(item, 2)), stride};
  }
  return segments;
}

size_t checked_window(size_t bytes) {
  if (bytes < PAGE || bytes > MAX_WINDOW_BYTES || bytes % PAGE != 0)
    throw std::invalid_argument("window_bytes must be a multiple of 4096, up to 4 GiB");
  return bytes;
}

nb::object tuple_of(const Message& message) {
  return nb::make_tuple(message.address, message.num_bytes, message.number);
}

uint64_t post(Channel& channel, nb::handle given, double timeout_s) {
  const Segments segments = segments_of(given);
  // A thread that releases the GIL may wait long until it has it again.
  if (const auto number = channel.post_at_once(segments)) return *number;
  nb::gil_scoped_release release;
  return channel.post(segments, timeout_s);
}

nb::object poll(Channel& channel, double timeout_s) {
  std::optional<Message> message = channel.poll_at_once();
  if (!message) {
    nb::gil_scoped_release release;
    message = channel.poll(timeout_s);
  }
  return message ? tuple_of(*message) : nb::object(nb::none());
}

// Releasing and retaking the GIL costs as much as some ten kilobytes of work.
template <class Work>
uint32_t released_if_long(size_t bytes, Work work) {
  if (bytes <= Channel::QUICK_BYTES) return work();
  nb::gil_scoped_release release;
  return work();
}

std::string string_of(const nb::bytes& bytes) { return std::string(bytes.c_str(), bytes.size()); }
nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

void make_socket_channel(SocketChannel* self, int fd, size_t own, size_t peers, std::shared_ptr<Link> link,
                         std::optional<std::pair<nb::bytes, nb::bytes>> secrets, uint64_t records_per_key) {
  std::optional<SocketChannel::Secrets> given;
  if (secrets) given = {string_of(secrets->first), string_of(secrets->second), records_per_key};
  new (self) SocketChannel(fd, checked_window(own), checked_window(peers), std::move(link), given);
}

uint32_t gather_at(uintptr_t address, nb::handle given) {
  const Segments segments = segments_of(given);
  return released_if_long(total_bytes(segments), [&] { return gather(reinterpret_cast<void*>(address), segments); });
}

uint32_t crc32c_at(uintptr_t address, size_t size, uint32_t crc) {
  return released_if_long(size, [&] { return crc32c(crc, reinterpret_cast<const void*>(address), size); });
}

// Returns 0 once all ranks have arrived, Arena::ABORTED, or the set of those that are missing.
int64_t barrier(Arena& arena, double deadline_s) {
  constexpr int64_t SLICE_NS = 500'000'000;  // a signal's Python handler runs between two slices
  const int64_t began_ns = now_ns(), deadline_ns = began_ns + static_cast<int64_t>(std::clamp(deadline_s, 0.0, 1e6) * 1e9);
  if (!arena.arrive()) return Arena::ABORTED;
  int64_t missing;
  do {
    {
      nb::gil_scoped_release release;
      missing = arena.wait(std::min(deadline_ns, now_ns() + SLICE_NS));
    }
    if (missing > 0 && PyErr_CheckSignals() != 0) {
      arena.leave(began_ns, false);
      throw nb::python_error();
    }
  } while (missing > 0 && now_ns() < deadline_ns);
  arena.leave(began_ns, missing == 0);
  return missing;
}

template <class Error>
void translate_to(const char* name) {
  nb::register_exception_translator(
      [](const std::exception_ptr& pointer, void* name) {
        try {
          std::rethrow_exception(pointer);
        } catch (const Error& error) {
          const nb::object type = nb::module_::import_("transport.base").attr(static_cast<const char*>(name));
          PyErr_SetString(type.ptr(), error.what());
        }
      },
      const_cast<char*>(name));
}

// Translates std::system_error into OSError with its errno.
void translate_system_errors() {
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    }
  });
}

}  // namespace

NB_MODULE(_windows, m) {
  nb::set_leak_warnings(false);  // an endpoint may live until the process ends
  translate_system_errors();
  translate_to<PeerLost>("PeerLostError");
  translate_to<CorruptMessage>("CorruptMessageError");
  translate_to<TimedOut>("TransportTimeoutError");
  translate_to<NoCrypto>("TransportError");
  m.attr("ARENA_DATA_AT") = PAGE;
  m.attr("NUM_SLOTS") = NUM_SLOTS;
  m.attr("HEARTBEAT_S") = 1e-9 * HEARTBEAT_NS;
  m.attr("LOST_AFTER_S") = 1e-9 * LOST_AFTER_NS;
  m.attr("DESCRIPTORS_AT") = DESCRIPTORS_AT;
  m.attr("DESCRIPTOR_BYTES") = sizeof(Descriptor);
  m.attr("DESCRIPTOR_SENT_BYTES") = DESCRIPTOR_SENT_BYTES;
  m.attr("PAYLOAD_AT") = PAYLOAD_AT;
  m.attr("RECORD_TEXT_BYTES") = RECORD_TEXT_BYTES;
  m.attr("RECORDS_PER_KEY") = RECORDS_PER_KEY;

  m.def("crc32c", &crc32c_at, "address"_a, "num_bytes"_a, "crc"_a = 0);
  m.def("gather", &gather_at, "address"_a, "segments"_a);
  m.def("create_window_fd", [](size_t bytes) { return create_window_fd(checked_window(bytes)); }, "window_bytes"_a);

  m.def("x25519_public", [](nb::bytes key) { return bytes_of(x25519_public(string_of(key))); }, "private_key"_a);
  m.def("x25519_shared", [](nb::bytes ours, nb::bytes theirs) {
    return bytes_of(x25519_shared(string_of(ours), string_of(theirs)));
  }, "private_key"_a, "public_key"_a);

  m.def("create_arena_fd", &Arena::create_fd, "num_bytes"_a, "num_ranks"_a);
  nb::class_<Arena>(m, "Arena")
      .def(nb::init<int, int>(), "fd"_a, "rank"_a)
      .def("join", &Arena::join, "generation"_a)
      .def("barrier", &barrier, "deadline_s"_a)
      .def("abort", &Arena::abort, "generation"_a)
      .def("reset", &Arena::reset, "generation"_a)
      .def_prop_ro("num_bytes", &Arena::num_bytes)
      .def_prop_ro("num_ranks", &Arena::num_ranks)
      .def_prop_ro("generation", &Arena::generation)
      .def_prop_ro("is_aborted", &Arena::is_aborted)
      .def_prop_ro("waited_s", &Arena::waited_s)
      .def_prop_ro("num_barriers", &Arena::num_barriers)
      .def_prop_rw("spin_s", &Arena::spin_s, &Arena::set_spin_s);

  nb::class_<Link>(m, "Link")
      .def_static("of_socket", [](int fd) { return std::make_shared<Link>(fd); }, "control_fd"_a)
      .def_static("pair", &Link::make_pair)
      .def("watch", &Link::watch)
      .def("end", &Link::end, "reason"_a)
      .def("event_fd", &Link::event_fd)
      .def_prop_ro("is_over", &Link::is_over)
      .def_prop_ro("reason", &Link::reason)
      .def_prop_ro("silence_s", &Link::silence_s);
  nb::class_<Memory>(m, "Memory")
      .def_static("anonymous", [](size_t bytes) { return std::make_shared<Memory>(checked_window(bytes)); },
                  "window_bytes"_a)
      .def_static("of_fd", [](size_t bytes, int fd) { return std::make_shared<Memory>(checked_window(bytes), fd); },
                  "window_bytes"_a, "fd"_a)
      .def("keep_from_forks", &Memory::keep_from_forks)
      .def_prop_ro("address", [](const Memory& memory) { return reinterpret_cast<uintptr_t>(memory.base()); })
      .def_prop_ro("num_bytes", &Memory::num_bytes);
  nb::class_<Channel>(m, "Channel")
      .def_prop_ro("max_message_bytes", &Channel::max_message_bytes)
      .def("post", &post, "segments"_a, "timeout_s"_a)
      .def("poll", &poll, "timeout_s"_a)
      .def("release", &Channel::release, "number"_a)
      .def("close", &Channel::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("is_lost", &Channel::is_lost)
      .def_prop_ro("silence_s", &Channel::silence_s)
      .def_prop_rw("spin_s", &Channel::spin_s, &Channel::set_spin_s);
  nb::class_<SharedChannel, Channel>(m, "SharedChannel")
      .def(nb::init<std::shared_ptr<Memory>, std::shared_ptr<Memory>, std::shared_ptr<Link>>(), "own"_a, "peers"_a,
           "link"_a);
  nb::class_<SocketChannel, Channel>(m, "SocketChannel")
      .def("__init__", &make_socket_channel, "data_fd"_a, "own_window_bytes"_a, "peer_window_bytes"_a, "link"_a,
           "secrets"_a = nb::none(), "records_per_key"_a = RECORDS_PER_KEY);
  nb::class_<MirroredChannel, Channel>(m, "MirroredChannel")
      .def("__init__", [](MirroredChannel* self, std::shared_ptr<Memory> own, std::shared_ptr<Memory> mirror,
                          std::shared_ptr<Link> link, nb::object writer, size_t max_message_bytes, bool is_ordered) {
        new (self) MirroredChannel(std::move(own), std::move(mirror), std::move(link),
                                   std::make_unique<PythonWriter>(std::move(writer)), max_message_bytes, is_ordered);
      }, "own"_a, "mirror"_a, "link"_a, "writer"_a, "max_message_bytes"_a, "is_ordered"_a);
}
