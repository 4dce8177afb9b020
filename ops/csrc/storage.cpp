// Binds the storage path: IoRing, batches of blocks and the checksum of a page. A std::system_error
// becomes the OSError of its number.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "binding.h"
#include "blocks.h"
#include "checksum.h"
#include "io_ring.h"

namespace nb = nanobind;

namespace ms {
namespace {

constexpr size_t FIELDS = 5;

size_t submit(IoRing& ring, const std::vector<uint64_t>& fields) {
  std::vector<Operation> operations;
  for (size_t i = 0; i + FIELDS <= fields.size(); i += FIELDS)
    operations.push_back({fields[i], fields[i + 1] != 0, fields[i + 2], static_cast<uint32_t>(fields[i + 3]), fields[i + 4]});
  nb::gil_scoped_release release;
  return ring.submit(operations);
}

std::vector<std::pair<uint64_t, int>> reap(IoRing& ring, unsigned at_least, double timeout_s) {
  std::vector<std::pair<uint64_t, int>> found;
  nb::gil_scoped_release release;
  for (const Event& event : ring.reap(at_least, timeout_s)) found.emplace_back(event.tag, event.result);
  return found;
}

void register_buffers(IoRing& ring, const std::vector<std::pair<uintptr_t, size_t>>& regions) {
  std::vector<Region> all;
  for (const auto& [address, size] : regions) all.push_back({address, size});
  nb::gil_scoped_release release;
  ring.register_buffers(std::move(all));
}

void check(int number, const char* call) {
  if (number != 0) throw std::system_error(number, std::generic_category(), call);
}

using Addresses = std::pair<uintptr_t, uintptr_t>;

// places: addresses of the int64 arrays of memory addresses and file offsets; sums: of a uint32
// array.
void transfer(IoRing& ring, bool is_write, Addresses places, uintptr_t sums, size_t count, size_t length) {
  const Blocks blocks{is_write, pointer<int64_t>(places.first), pointer<int64_t>(places.second), pointer<uint32_t>(sums),
                      count, length};
  nb::gil_scoped_release release;
  check(transfer_blocks(ring, blocks), is_write ? "writing blocks" : "reading blocks");
}

void as_os_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    const nb::object value = nb::borrow(PyExc_OSError)(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, value.ptr());
  }
}

}  // namespace

void bind_storage(nb::module_& m) {
  nb::register_exception_translator(as_os_error);
  nb::class_<IoRing>(m, "IoRing")
      .def(nb::init<int, unsigned, bool, bool>())
      .def("register_buffers", &register_buffers)
      .def("submit", &submit)
      .def("reap", &reap)
      .def("transfer_blocks", &transfer);
  m.def("checksum", [](uintptr_t address, size_t size) {
    if (size <= 240) throw nb::value_error("the checksum needs more than 240 bytes");
    nb::gil_scoped_release release;
    return checksum(pointer<uint8_t>(address), size);
  });
}

}  // namespace ms
