// What the kernels of layers with a state work on (see ops/states.py, which also has the formulas).
#pragma once

#include "kernels.h"

namespace ms {

constexpr int MAX_CONV_WIDTH = 8;
constexpr int64_t NO_RECORD = -1;

// The rows of a step. Segment i has the rows firsts[i] to firsts[i + 1] - 1, at least one; sequence i has the
// segments sequences[i] to sequences[i + 1] - 1.
struct StateSegments {
  const int64_t *firsts, *sources, *targets, *sequences;
  int num_sequences;

  int64_t first_row(int sequence) const { return firsts[sequences[sequence]]; }
  int64_t num_rows(int sequence) const { return first_row(sequence + 1) - first_row(sequence); }
  int64_t rows() const { return num_sequences ? first_row(num_sequences) : 0; }
};

// What a layer keeps in the records of all sequences; `stride` is from record to record.
struct StateRecords {
  float* data;
  size_t stride;

  float* at(int64_t record) const { return data + static_cast<size_t>(record) * stride; }
};

// Inputs: q and k [rows][key_heads][key_dim], v [rows][heads][value_dim], a and b [rows][heads]; with
// is_per_channel a and bias have key_dim numbers for each head. b is null without is_delta; skip may be null.
struct LinearAttention {
  Rows q, k, v, a, b;
  int heads, key_heads, key_dim, value_dim;
  const float *rates, *bias, *skip;
  bool is_delta, is_per_channel, has_unit_keys;
  float scale, beta_scale, dt_min, dt_max;
  void* out;  // dense, of v's type
};

struct CausalConv {
  Rows x;
  int channels, width;
  const float *weight, *bias;  // [channels][width]; the bias may be null
  bool has_silu;
  void* out;  // dense, of x's type
};

struct GatedNorm {
  Rows x, gate;
  int rows, num_in, group;
  const float* weight;  // null: only the product
  float eps;
  bool is_silu, gates_first;
  void* out;  // dense, of x's type
};

}  // namespace ms
