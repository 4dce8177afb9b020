// Adapts a Python object, transport.rdma.Wire on pyverbs, to Writer.
#pragma once

#include <nanobind/nanobind.h>

#include "mirrored_channel.h"

namespace ms {

// The channel calls it without the GIL. Python exceptions reach the channel's caller.
class PythonWriter final : public Writer {
 public:
  explicit PythonWriter(nanobind::object writer) : writer_(std::move(writer)) {}
  ~PythonWriter() override {
    nanobind::gil_scoped_acquire acquire;
    writer_.reset();
  }
  void write(size_t payload, size_t payload_bytes, size_t descriptor) override {
    nanobind::gil_scoped_acquire acquire;
    writer_.attr("write")(payload, payload_bytes, descriptor);
  }
  void tell() override {
    nanobind::gil_scoped_acquire acquire;
    writer_.attr("tell")();
  }
  uint64_t num_arrived() override {
    nanobind::gil_scoped_acquire acquire;
    return nanobind::cast<uint64_t>(writer_.attr("num_arrived")());
  }
  void sleep(double timeout_s) override {
    nanobind::gil_scoped_acquire acquire;
    writer_.attr("sleep")(timeout_s);
  }

 private:
  nanobind::object writer_;
};

}  // namespace ms
