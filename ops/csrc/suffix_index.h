// A suffix automaton of a growing text of tokens (Blumer et al., 1985): finds the longest end of a text
// that occurred before, and what followed it there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ms {

// What follows a match of `length` tokens.
struct Continuation {
  int length = 0;
  std::vector<int32_t> tokens;
};

class SuffixIndex {
 public:
  SuffixIndex();

  // Appends tokens in amortized constant time each. A negative token separates texts: it is in no match
  // and in no continuation.
  void extend(const int32_t* tokens, size_t count);

  // Returns up to `most` tokens that followed the longest earlier occurrence of the text's end, if that has
  // at least `least` tokens. Of several occurrences it takes a recent one. A continuation that reaches the
  // text's end goes on with its own tokens, so that a text that repeats itself does so for ever.
  Continuation follow(int least, int most) const;

  size_t size() const { return text_.size(); }
  size_t bytes() const;

 private:
  friend class SuffixCursor;

  struct State {
    int32_t length;  // of its longest string
    int32_t link;    // the state of the longest suffix that occurs elsewhere; -1: none
    int32_t end;     // where an occurrence ends
    int32_t edges;   // the first one; -1: none
  };
  struct Edge {
    int32_t state, token, target, next;
  };

  int find(int state, int32_t token) const;  // an edge, or -1
  size_t slot_of(int state, int32_t token) const;
  void add_edge(int state, int32_t token, int target);
  void append(int32_t token);
  int split(int from, int32_t token, int state);
  void copy(int first, int most, std::vector<int32_t>& out) const;

  std::vector<int32_t> text_;
  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t> slots_;  // a hash table of edges by state and token; -1: empty
  int last_ = 0;   // the state of the whole text since the last separator
  int match_ = 0;  // that of the longest end that occurred before
};

// Follows a text through the index of other texts, which may grow.
class SuffixCursor {
 public:
  explicit SuffixCursor(const SuffixIndex& index) : index_(index) {}

  void advance(const int32_t* tokens, size_t count);
  Continuation follow(int least, int most);

 private:
  void settle();

  const SuffixIndex& index_;
  int state_ = 0, length_ = 0;
};

}  // namespace ms
