#pragma once

#include <stdexcept>

namespace ms {

// module.cpp translates these into the exceptions of transport/base.py.
struct PeerLost : std::runtime_error {
  using runtime_error::runtime_error;
};
struct CorruptMessage : std::runtime_error {
  using runtime_error::runtime_error;
};
struct NoCrypto : std::runtime_error {
  using runtime_error::runtime_error;
};
struct TimedOut : std::runtime_error {
  using runtime_error::runtime_error;
};

}  // namespace ms
