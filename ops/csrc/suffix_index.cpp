// A suffix automaton with its edges in one hash table, and its bindings.
#include "suffix_index.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>

#include "binding.h"

namespace ms {

namespace {

// How many shorter matches, which occur wherever the longest does, learn of its newest place.
constexpr int NEWEST_FOR = 4;
constexpr size_t FEWEST_SLOTS = 64;
constexpr size_t MOST_TOKENS = size_t{1} << 29;

}  // namespace

SuffixIndex::SuffixIndex() : states_{{0, -1, -1, -1}}, slots_(FEWEST_SLOTS, -1) {}

size_t SuffixIndex::bytes() const {
  return text_.capacity() * sizeof(int32_t) + states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) +
         slots_.capacity() * sizeof(int32_t);
}

size_t SuffixIndex::slot_of(int state, int32_t token) const {
  uint64_t key = static_cast<uint64_t>(state) << 32 | static_cast<uint32_t>(token);
  key = (key ^ key >> 31) * 0x9E3779B97F4A7C15u;
  return (key ^ key >> 32) & (slots_.size() - 1);
}

int SuffixIndex::find(int state, int32_t token) const {
  for (size_t slot = slot_of(state, token); slots_[slot] >= 0; slot = (slot + 1) & (slots_.size() - 1)) {
    const Edge& edge = edges_[slots_[slot]];
    if (edge.state == state && edge.token == token) return slots_[slot];
  }
  return -1;
}

void SuffixIndex::add_edge(int state, int32_t token, int target) {
  edges_.push_back({state, token, target, states_[state].edges});
  states_[state].edges = static_cast<int32_t>(edges_.size()) - 1;
  size_t first = edges_.size() - 1;
  if (2 * edges_.size() > slots_.size()) {
    slots_.assign(2 * slots_.size(), -1);
    first = 0;
  }
  for (size_t i = first; i < edges_.size(); i++) {
    size_t slot = slot_of(edges_[i].state, edges_[i].token);
    while (slots_[slot] >= 0) slot = (slot + 1) & (slots_.size() - 1);
    slots_[slot] = static_cast<int32_t>(i);
  }
}

// Makes a state of its own for the strings of `state` that are shorter than those that need it whole.
int SuffixIndex::split(int from, int32_t token, int state) {
  const int clone = static_cast<int>(states_.size());
  states_.push_back({states_[from].length + 1, states_[state].link, states_[state].end, -1});
  for (int i = states_[state].edges; i >= 0; i = edges_[i].next) add_edge(clone, edges_[i].token, edges_[i].target);
  states_[state].link = clone;
  for (; from >= 0; from = states_[from].link) {
    const int edge = find(from, token);
    if (edge < 0 || edges_[edge].target != state) break;
    edges_[edge].target = clone;
  }
  return clone;
}

void SuffixIndex::append(int32_t token) {
  const int end = static_cast<int>(text_.size());
  for (int i = 0, state = match_; i < NEWEST_FOR && state > 0; i++, state = states_[state].link)
    states_[state].end = end - 1;
  text_.push_back(token);
  if (token < 0) {
    last_ = match_ = 0;  // a match does not begin before a separator
    return;
  }
  int edge = find(last_, token);
  if (edge >= 0) {  // only after a separator: the text's beginning is known already
    const int known = edges_[edge].target;
    last_ = states_[known].length == states_[last_].length + 1 ? known : split(last_, token, known);
    match_ = last_;
    return;
  }
  const int made = static_cast<int>(states_.size());
  states_.push_back({states_[last_].length + 1, 0, end, -1});
  int from = last_;
  for (; from >= 0 && (edge = find(from, token)) < 0; from = states_[from].link) add_edge(from, token, made);
  if (from >= 0) {
    const int target = edges_[edge].target;
    const bool is_whole = states_[target].length == states_[from].length + 1;
    states_[made].link = is_whole ? target : split(from, token, target);
  }
  last_ = made;
  match_ = states_[made].link;
}

void SuffixIndex::extend(const int32_t* tokens, size_t count) {
  if (count > MOST_TOKENS - text_.size()) throw std::length_error("a text of more than 2^29 tokens");
  for (size_t i = 0; i < count; i++) append(tokens[i]);
}

// Copies up to `most` tokens from `first` on; those after the text's end are the copied ones.
void SuffixIndex::copy(int first, int most, std::vector<int32_t>& out) const {
  const int size = static_cast<int>(text_.size());
  for (int at = first; at < first + most; at++) {
    const int32_t token = at < size ? text_[at] : out[at - size];
    if (token < 0) break;
    out.push_back(token);
  }
}

Continuation SuffixIndex::follow(int least, int most) const {
  Continuation found;
  if (match_ <= 0 || states_[match_].length < least) return found;
  found.length = states_[match_].length;
  copy(states_[match_].end + 1, most, found.tokens);
  return found;
}

// The index may have split the state since; a shorter string than its own ones is in another one.
void SuffixCursor::settle() {
  const auto& states = index_.states_;
  while (state_ > 0 && states[states[state_].link].length >= length_) state_ = states[state_].link;
}

void SuffixCursor::advance(const int32_t* tokens, size_t count) {
  const auto& states = index_.states_;
  for (size_t i = 0; i < count; i++) {
    settle();
    int edge;
    while ((edge = index_.find(state_, tokens[i])) < 0 && state_ > 0) {
      state_ = states[state_].link;
      length_ = states[state_].length;
    }
    if (edge < 0) continue;
    state_ = index_.edges_[edge].target;
    length_++;
  }
}

Continuation SuffixCursor::follow(int least, int most) {
  Continuation found;
  settle();
  if (state_ <= 0 || length_ < least) return found;
  found.length = length_;
  const int first = index_.states_[state_].end + 1, size = static_cast<int>(index_.text_.size());
  index_.copy(first, most < size - first ? most : size - first, found.tokens);
  return found;
}

namespace {

using Found = std::pair<int, std::vector<int32_t>>;

Found as_pair(Continuation&& found) { return {found.length, std::move(found.tokens)}; }

}  // namespace

void bind_suffix_index(nanobind::module_& m) {
  namespace nb = nanobind;
  nb::class_<SuffixIndex>(m, "SuffixIndex")
      .def(nb::init<>())
      .def("extend", [](SuffixIndex& self, const std::vector<int32_t>& tokens) { self.extend(tokens.data(), tokens.size()); })
      .def("follow", [](const SuffixIndex& self, int least, int most) { return as_pair(self.follow(least, most)); })
      .def_prop_ro("size", &SuffixIndex::size)
      .def_prop_ro("bytes", &SuffixIndex::bytes);
  nb::class_<SuffixCursor>(m, "SuffixCursor")
      .def(nb::init<const SuffixIndex&>(), nb::keep_alive<1, 2>())
      .def("advance", [](SuffixCursor& self, const std::vector<int32_t>& tokens) { self.advance(tokens.data(), tokens.size()); })
      .def("follow", [](SuffixCursor& self, int least, int most) { return as_pair(self.follow(least, most)); });
}

}  // namespace ms
