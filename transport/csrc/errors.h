#pragma once

#include <stdexcept>

namespace ms {

// Become the exceptions of transport/base.py (module.cpp).
struct PeerLost : std::runtime_error {
  using runtime_error::runtime_error;
};
struct CorruptMessage : std::runtime_error {
  using runtime_error::runtime_error;
};
struct TimedOut : std::runtime_error {
  using runtime_error::runtime_error;
};

}  // namespace ms
