// Declarations that the Python bindings share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.h"

namespace ms {

template <class T>
T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

// The sequences of one step, shared by all layers. past_only: the positions of its rows
// begin after all kv_len keys, so that each row attends to all of them.
class StepPlan {
 public:
  StepPlan(uintptr_t cache, size_t tile_bytes, const std::vector<size_t>& starts,
           const std::vector<int>& num_rows, const std::vector<int>& kv_lens, bool past_only)
      : tile_bytes_(tile_bytes) {
    int row = 0;
    for (size_t i = 0; i < starts.size(); i++) {
      const int first = past_only ? kv_lens[i] : kv_lens[i] - num_rows[i];
      sequences_.push_back({pointer<uint8_t>(cache) + starts[i], row, num_rows[i], kv_lens[i], first});
      row += num_rows[i];
    }
  }
  // Adds the store of the rows' own blocks.
  void add_recent(uintptr_t cache, size_t tile_bytes, const std::vector<size_t>& starts) {
    recent_ = moved_to(cache, starts);
    recent_tile_bytes_ = tile_bytes;
  }
  // Adds the store of the bounds of the keys, which otherwise lie in the tiles of the keys.
  void add_bounds(uintptr_t cache, size_t tile_bytes, const std::vector<size_t>& starts) {
    bounds_ = moved_to(cache, starts);
    bounds_tile_bytes_ = tile_bytes;
  }
  // Makes each tile of K/V lie where `places` says, the tiles of the sequences one after the other. The caller keeps
  // this array, and may change it between layers. Other stores stay as they are.
  void place_tiles(uintptr_t places) {
    uint8_t* const* at = pointer<uint8_t*>(places);
    for (SequenceRows& seq : sequences_) {
      seq.places = at;
      at += (seq.kv_len + TILE - 1) / TILE;
    }
  }
  // Makes the last num_selecting[i] rows of sequence i read so many tiles each, where a layer has bounds.
  void select(std::vector<int> num_selecting, std::vector<int> budgets) {
    num_selecting_ = std::move(num_selecting);
    budgets_ = std::move(budgets);
  }
  bool has_recent() const { return !recent_.empty(); }
  bool selects() const { return !budgets_.empty(); }
  // offset: of a layer's bounds in a tile of the store that has them.
  KeyBounds bounds(size_t offset) const {
    return {bounds_.empty() ? get() : step_of(bounds_, bounds_tile_bytes_), offset};
  }
  Selection selection(size_t bounds_offset) const {
    return {bounds(bounds_offset), num_selecting_.data(), budgets_.data()};
  }
  // The number of tiles of all sequences, one after the other.
  size_t num_tiles() const {
    size_t count = 0;
    for (const SequenceRows& seq : sequences_) count += (seq.kv_len + TILE - 1) / TILE;
    return count;
  }
  Step get() const { return step_of(sequences_, tile_bytes_); }
  Step recent() const { return step_of(recent_, recent_tile_bytes_); }

 private:
  static Step step_of(const std::vector<SequenceRows>& sequences, size_t tile_bytes) {
    return {sequences.data(), static_cast<int>(sequences.size()), tile_bytes};
  }
  std::vector<SequenceRows> moved_to(uintptr_t cache, const std::vector<size_t>& starts) const {
    std::vector<SequenceRows> moved = sequences_;
    for (size_t i = 0; i < starts.size(); i++) {
      moved[i].base = pointer<uint8_t>(cache) + starts[i];
      moved[i].places = nullptr;
    }
    return moved;
  }
  std::vector<SequenceRows> sequences_, recent_, bounds_;
  size_t tile_bytes_, recent_tile_bytes_ = 0, bounds_tile_bytes_ = 0;
  std::vector<int> num_selecting_, budgets_;
};

// Binds Int8Linear, Int4Linear and PlainLinear; defined in linear.cpp.
void bind_linear(nanobind::module_& m);

// Binds SuperblockLinear; defined in superblocks.cpp.
void bind_superblocks(nanobind::module_& m);

// Binds Experts and route; defined in experts.cpp.
void bind_experts(nanobind::module_& m);

// Binds HeadLayer and round_rows; defined in heads.cpp.
void bind_heads(nanobind::module_& m);

// Binds the operators of layers with a state; defined in states.cpp.
void bind_states(nanobind::module_& m);

// Binds ScorePlan and KeyScoring; defined in key_scores.cpp.
void bind_key_scores(nanobind::module_& m);

// Binds IoRing and checksum; defined in storage.cpp.
void bind_storage(nanobind::module_& m);

// Binds LatentAttention; defined in latent.cpp.
void bind_latent(nanobind::module_& m);

// Binds SuffixIndex and SuffixCursor; defined in suffix_index.cpp.
void bind_suffix_index(nanobind::module_& m);

}  // namespace ms
