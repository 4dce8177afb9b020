// Buffers of linear layers that were packed before, for layers made over memory that holds them.
#pragma once

#include <stdexcept>
#include <vector>

#include "buffer.h"

namespace ms {

// The buffers of a layer. Without a bias or scales, their spans are empty.
struct Stored {
  Span packed, scales, bias;
};

// Returns a part of `stored`, or new memory if that is null.
inline Buffer buffer(size_t bytes, const Stored* stored, Span Stored::*part) {
  return stored ? Buffer(bytes, stored->*part) : Buffer(bytes);
}

// Buffers as Python has them: address and bytes of packed weights, of scales and of the bias.
using Spans = std::vector<size_t>;

inline Stored stored_in(const Spans& spans) {
  if (spans.size() != 6) throw std::invalid_argument("a layer has three buffers");
  return {{spans[0], spans[1]}, {spans[2], spans[3]}, {spans[4], spans[5]}};
}

inline Spans spans_of(const Stored& s) {
  return {s.packed.address, s.packed.bytes, s.scales.address, s.scales.bytes, s.bias.address, s.bias.bytes};
}

}  // namespace ms
