// The plain structures of attention: layers, sequences and rows, and which keys rows read. Sizes are in
// elements unless the name or a comment says bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ms {

enum class DType : int { f32, bf16 };

// Locates one layer's K and V in a tile of TILE tokens (see kv_shape.inl). bits: 8 or 4, of a value.
constexpr int TILE = 16, MAX_HEAD_DIM = 512, MAX_PLAIN_DIM = 1024, MAX_GROUPS = MAX_HEAD_DIM / 8;
struct CacheLayer {
  size_t offset_bytes;  // from the start of a tile
  int num_kv_heads, head_dim, group, bits;
};

struct AttentionLayer {
  CacheLayer cache;
  int num_heads;
  float scale;
  int window;           // 0 means none
  float soft_cap;       // 0 means none
  const float* slopes;  // ALiBi, per head, or null
  const float* sinks;   // a logit per head that only adds to the denominator, or null
};

// One layer of latents (see attention_latent.inl): one vector of value_dim + rope_dim numbers for each
// token, of which all query heads use all as K and the first value_dim as V.
constexpr int MAX_LATENT_DIM = 1024;
struct LatentLayer {
  size_t offset_bytes;  // from the start of a tile
  int num_heads, value_dim, rope_dim;
  int group, rope_group;  // numbers that share a scale, in the first value_dim and in the rest
  float scale;
};

// One sequence of a step. Its rows begin at row first_row of the step and at position
// first_position of the sequence. A row attends to the keys up to its own position that are among
// the first kv_len keys.
//
// A single row may read some of its tiles alone: with `tiles`, key i of K/V head h is key i % TILE of tile
// tiles[h * tiles_stride + i / TILE], and kv_len counts the keys of these tiles.
//
// Tiles lie in a row from `base` on, or each where `places` says.
struct SequenceRows {
  uint8_t* base;
  int first_row, num_rows, kv_len, first_position;
  uint8_t* const* places = nullptr;
  const int32_t* tiles = nullptr;
  int tiles_stride = 0;

  uint8_t* tile_at(size_t tile, size_t tile_bytes) const { return places ? places[tile] : base + tile * tile_bytes; }
};

// K and V of one sequence in bf16 or fp32; strides in elements.
struct PlainSequence {
  const void *k, *v;
  size_t token_stride, head_stride;
  int length;
};
struct PlainLayer {
  int num_heads, num_kv_heads, head_dim;
  float scale;
  DType type;
  float soft_cap = 0.0f;         // as in AttentionLayer
  const float* sinks = nullptr;
};
// Query rows, [count][heads][dim] with dense heads, from position first_position of a sequence on.
// `window` is the number of keys that a row attends to, its own included; 0 means all. `out` is
// dense and has the queries' type; lse is [count][heads].
struct PrefillRows {
  const void* q;
  size_t q_stride;
  DType type;
  int count, first_position, window;
  void* out;
  float* lse;
};

// Attention of some rows over a part of the keys: dense out [rows][heads][dim], lse [rows][heads].
struct PartialRows {
  void* out;
  DType type;
  float* lse;
  size_t stride, lse_stride;  // from row to row, in elements
};

// Attention of single rows may be computed in two calls. `begin` adds the keys before the row's own,
// as far as they fill whole runs of the kernel, before the row's own key is written. `finish` adds
// the rest and gives the bits of one call. In between, `sums` holds two parts for each single row,
// [rows][2][heads][dim + 2]: of the earlier splits, and of the row's own split. Sequences with
// several rows are computed by `finish` alone.
enum class Phase : int { whole, begin, finish };
struct Phased {
  Phase phase = Phase::whole;
  float* sums = nullptr;
};

struct Step {
  const SequenceRows* sequences;
  int num_sequences;
  size_t tile_bytes;
};

// A second store of a layer's K and V in more bits, from which a row reads the keys of its own block:
// those from the last multiple of RECENT_BLOCK up to its position. Other stores hold the earlier keys.
// The step's sequences are those of the other store, with bases of their own.
constexpr int RECENT_BLOCK = 128;
struct RecentStore {
  Step step;
  CacheLayer cache;
};

// Where the bounds of a layer's keys lie (see kv_bounds.inl): `step` has the step's sequences with the bases and
// the tiles of the store that holds them, which is that of K and V or one beside it.
struct KeyBounds {
  Step step;
  size_t offset;  // of the layer's bounds, from the start of a tile of this store
};

// Which tiles rows read (see attention_select.inl). num_selecting: for each sequence, how many of its last
// rows read a part of its tiles. budgets: for each of these rows the number of tiles, its own included.
struct Selection {
  KeyBounds bounds;
  const int* num_selecting;
  const int* budgets;
};

// Rows that choose among tiles of which other machines have some (see attention_share.inl). num_tiles: for each row,
// how many tiles of its sequence before its own are here, the first ones; wanted: how many it chooses of all.
struct TileShares {
  const int* num_tiles;
  const int* wanted;
};

// What the rows may choose of one machine's tiles, and where to write how many of these are chosen, [rows][kv_heads].
// Of several machines the one with number p has tiles p, p + machines, ... of each sequence.
struct ListedPart {
  TileShares shares;
  const int32_t* lists;
  int32_t* counts;
};

struct Rotation {
  const float* cos;  // [rows, half], or null
  const float* sin;
  int half;
};

// Rows of one sequence, its last ones, that give weights to its keys. Their sums are of the query heads of each K/V
// head together: [layers][kv_heads][stride], with a stride that is a multiple of TILE and at least the keys.
struct ScoredRows {
  SequenceRows rows;
  float* sums;
  size_t stride;
  const float* noise;      // is added to each key's scores, as sums; or null
  const float* sharpness;  // by which a row's scores are multiplied, [rows]; or null
};

// A layer's K in bf16 or fp32 in the tokens of a range, [num_kv_heads][head_dim] at offset_bytes of a token.
struct PlainKeys {
  size_t offset_bytes;
  int num_heads, num_kv_heads, head_dim;
  DType type;
  float scale, soft_cap;
};

}  // namespace ms
