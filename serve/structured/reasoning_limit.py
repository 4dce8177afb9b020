"""Ends a model's reasoning when its tokens are spent: the format's end is forced token by token.

What is forced follows from the sequence's tokens alone, as its mask does. A forced token is the
only one that its mask allows, so that it is sampled, counted and delivered like any other.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve.text.chat_parser import ChatFormat, make_parser
from serve.text.chat_parser.syntax.reader import longest_overlap
from serve.text.tokenizer import Tokenizer

_CHARACTER_BYTES = 4
NEXT = "\n\n"  # between the end of the reasoning and the answer, where the format has no marker
# The number of last tokens that may have changed: more than two steps in flight have.
_LOOK_BACK = 16

_new_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class ReasoningEnd:
    """How reasoning is ended before its time. style: it has a format of reasoning. message: the
    sentence that the model is made to think last; "" for none."""

    style: ChatFormat
    message: str = ""


class ReasoningLimits:
    """Makes the limits of an engine's sequences. The tokens of the end are found once."""

    def __init__(self, tokenizer: Tokenizer, end: ReasoningEnd) -> None:
        reasoning, message = end.style.reasoning, end.message
        assert reasoning is not None
        self.tokenizer = tokenizer
        self.style = end.style
        self.reasoning = reasoning
        rest = f"{reasoning.end}{reasoning.after or NEXT}"
        after_thought = self._encode(f"\n\n{message}\n{rest}" if message else f"\n{rest}")
        at_once = self._encode(f"\n{rest}")
        again = self._encode(f"\n{rest}{reasoning.before_content}")
        self._after_thought, self._at_once = (after_thought, again), (at_once, again)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def make(self, max_tokens: int, *, is_open: bool) -> ReasoningLimit:
        """Returns the limit of one sequence. is_open: its prompt ends inside the reasoning."""
        closings = self._after_thought if max_tokens else self._at_once
        return ReasoningLimit(self.tokenizer, self.style, max_tokens, closings, is_open=is_open)


class _Texts:
    """Decodes tokens to text, special tokens included. tail: the last characters."""

    def __init__(self, tokenizer: Tokenizer, tail_chars: int) -> None:
        self._tokenizer = tokenizer
        self._tail_chars = tail_chars
        self.tail = ""
        self._last: list[int] = []  # the last tokens, where they have no bytes of their own
        self._pieces = tokenizer.pieces
        self._decoder = _new_decoder("replace")
        self.is_whole = True  # the text does not end inside a character

    def push(self, token_ids: Sequence[int]) -> str:
        if self._pieces is None:
            decode = self._tokenizer.decode
            self._last = [*self._last, *token_ids][-_CHARACTER_BYTES:]
            self.is_whole = not decode(self._last, skip_special_tokens=False).endswith("\ufffd")
            return self._kept(decode(token_ids, skip_special_tokens=False))
        size = len(self._pieces)
        joined = b"".join([self._pieces[token] for token in token_ids if token < size])
        text = self._decoder.decode(joined)
        self.is_whole = not self._decoder.getstate()[0]
        return self._kept(text)

    def _kept(self, text: str) -> str:
        self.tail = (self.tail + text)[-self._tail_chars :]
        return text


class ReasoningLimit:
    """The limit of one sequence. max_tokens: the tokens that the model may think of its own
    accord. closings: the tokens that end the reasoning then, and those that end it again where a
    format lets the model return to it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        style: ChatFormat,
        max_tokens: int,
        closings: tuple[Sequence[int], Sequence[int]],
        *,
        is_open: bool,
    ) -> None:
        assert style.reasoning is not None
        self._tokenizer = tokenizer
        self._style = style
        self._begins, self._ends = style.reasoning.begins, style.reasoning.ends
        self._reopens = style.has_channels
        self._most_over = max(_CHARACTER_BYTES, *map(len, self._ends))
        self._max_tokens = max_tokens
        self._closings = closings
        self._begins_open = is_open
        self._settled_at: int | None = None  # the output's length at which nothing was left to do
        self._restart()

    def _restart(self) -> None:
        self._texts = _Texts(self._tokenizer, max(map(len, self._ends)))
        # a call without the end of the reasoning ends it, too
        tools: dict[str, dict[str, Any]] | None = None if self._reopens else {}
        self._parser = make_parser(self._style, tools, reasons=True, is_open=self._begins_open)
        self._head = ""  # the text before the reasoning
        self._seen: list[int] = []
        self._num_thoughts = 0  # tokens inside the reasoning that were not forced
        self._closing: Sequence[int] = self._closings[0]
        self._num_forced = 0  # tokens of `_closing` at the end of those seen
        self._is_settled = False

    def may_force(self, num_output: int) -> bool:
        """Returns whether the token after this many may be forced, as far as `observe` knows."""
        if num_output < self._max_tokens:
            return False
        return self._settled_at is None or num_output < self._settled_at

    def observe(self, token_ids: Sequence[int], begin: int, end: int) -> None:
        """Notes whether the reasoning has ended in the output token_ids[begin:end]. Only the loop
        calls it, between two steps, so that may_force() does not change within one."""
        size = end - begin
        if self._settled_at is not None and size < self._settled_at:
            self._settled_at = None  # tokens were removed
        if self._settled_at is None and (size >= self._max_tokens or self._reopens):
            self._follow(token_ids, begin, end)
            if self._is_settled:
                self._settled_at = size

    def forced(self, token_ids: Sequence[int], begin: int, end: int) -> int | None:
        """Returns the token that must follow the output token_ids[begin:end], if one must."""
        if end - begin < self._max_tokens:
            return None
        self._follow(token_ids, begin, end)
        return self._next()

    def _next(self) -> int | None:
        if self._num_forced:
            return self._closing[self._num_forced]
        over = self._num_thoughts - self._max_tokens
        if self._is_settled or not self._parser.is_reasoning or over < 0:
            return None
        # a character that has begun is completed, and so is the model's own end marker
        goes_on = not self._texts.is_whole or longest_overlap(self._texts.tail, self._ends) > 0
        return self._closing[0] if not goes_on or over >= self._most_over else None

    def _follow(self, token_ids: Sequence[int], begin: int, end: int) -> None:
        """Takes the output's tokens. Those below the limit are read at once, when it is reached:
        until then each token costs nothing, but where reasoning may begin again."""
        size = len(self._seen)
        start = max(0, size - _LOOK_BACK)
        seen = list(token_ids[begin + start : min(begin + size, end)])
        if self._seen[start:] != seen:
            self._restart()
        while begin + len(self._seen) < end and not self._is_settled:
            at, limit = begin + len(self._seen), begin + self._max_tokens
            if at < limit and self._parser.is_reasoning and not self._reopens:
                # of these many none is forced, whatever they say
                self._take_thoughts(token_ids[at : min(limit, end)])
            else:
                self._take(token_ids[at])

    def _take_thoughts(self, tokens: Sequence[int]) -> None:
        self._parser.push(self._texts.push(tokens))
        self._seen.extend(tokens)
        self._num_thoughts += len(tokens)
        self._is_settled = self._parser.has_reasoned

    def _take(self, token: int) -> None:
        expected = self._next()
        if expected is not None:
            # another token: a grammar did not allow the forced one
            self._num_forced = self._num_forced + 1 if token == expected else 0
        elif self._parser.is_reasoning:
            self._num_thoughts += 1
        text = self._texts.push((token,))
        self._seen.append(token)
        self._parser.push(text)
        if self._num_forced == len(self._closing):
            self._num_forced = 0
            self._is_settled = not self._reopens or self._closing is self._closings[1]
            self._closing = self._closings[1]
        elif self._reopens or self._parser.is_reasoning:
            return
        elif self._parser.has_reasoned:
            self._is_settled = not self._num_forced
        else:
            self._head += text
            head = self._head.lstrip()
            self._is_settled = bool(head) and not any(b.startswith(head) for b in self._begins)
