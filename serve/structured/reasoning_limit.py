"""Ends a model's reasoning when its tokens are spent: the format's end is forced token by token.

What is forced follows from the sequence's tokens alone, as its mask does. A forced token is the
only one that its mask allows, so that it is sampled, counted and delivered like any other.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from serve.text.chat_parser.formats import ReasoningFormat
from serve.text.chat_parser.reasoning import ReasoningParser
from serve.text.chat_parser.scan import overlap
from serve.text.tokenizer import Tokenizer

_CHARACTER_BYTES = 4
# The number of last tokens that may have changed: more than two steps in flight have.
_LOOK_BACK = 16

_new_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class ReasoningEnd:
    """How reasoning is ended before its time. message: the sentence that the model is made to
    think last; "" for none."""

    style: ReasoningFormat
    message: str = ""


class ReasoningLimits:
    """Makes the limits of an engine's sequences. The tokens of the end are found once."""

    def __init__(self, tokenizer: Tokenizer, end: ReasoningEnd) -> None:
        style, message = end.style, end.message
        self.tokenizer = tokenizer
        self.style = style
        before = f"\n\n{message}\n" if message else "\n"
        self._after_thought = self._encode(f"{before}{style.end}{style.resume}")
        self._at_once = self._encode(f"\n{style.end}{style.resume}")

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def make(self, max_tokens: int, *, is_open: bool) -> ReasoningLimit:
        """Returns the limit of one sequence. is_open: its prompt ends inside the reasoning."""
        closing = self._after_thought if max_tokens else self._at_once
        return ReasoningLimit(self.tokenizer, self.style, max_tokens, closing, is_open=is_open)


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
    accord. closing: the tokens that end the reasoning then."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        style: ReasoningFormat,
        max_tokens: int,
        closing: Sequence[int],
        *,
        is_open: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._max_tokens = max_tokens
        self._closing = closing
        self._begins_open = is_open
        self._settled_at: int | None = None  # the output's length at which nothing was left to do
        self._restart()

    def _restart(self) -> None:
        self._texts = _Texts(self._tokenizer, len(self._style.end))
        self._parser = ReasoningParser(self._style, is_open=self._begins_open)
        self._head = ""  # the text before the reasoning
        self._seen: list[int] = []
        self._num_thoughts = 0  # tokens inside the reasoning that were not forced
        self._num_forced = 0  # tokens of `closing` at the end of those seen
        self._is_settled = False

    def may_force(self, num_output: int) -> bool:
        """Returns whether the token after this many may be forced, as far as `observe` knows."""
        if num_output < self._max_tokens:
            return False
        return self._settled_at is None or num_output < self._settled_at

    def observe(self, output: Sequence[int]) -> None:
        """Notes whether the reasoning has ended. Only the loop calls it, between two steps, so
        that may_force() does not change within one."""
        if self._settled_at is not None and len(output) < self._settled_at:
            self._settled_at = None  # tokens were removed
        if len(output) >= self._max_tokens and self._settled_at is None:
            self._follow(output)
            if self._is_settled:
                self._settled_at = len(output)

    def forced(self, output: Sequence[int]) -> int | None:
        """Returns the token that must follow the output, if one must."""
        if len(output) < self._max_tokens:
            return None
        self._follow(output)
        return self._next()

    def _next(self) -> int | None:
        if self._num_forced:
            return self._closing[self._num_forced]
        over = self._num_thoughts - self._max_tokens
        if self._is_settled or not self._parser.is_open or over < 0:
            return None
        end = self._style.end
        # a character that has begun is completed, and so is the model's own end marker
        goes_on = not self._texts.is_whole or overlap(self._texts.tail, end) > 0
        is_due = not goes_on or over >= max(_CHARACTER_BYTES, len(end))
        return self._closing[0] if is_due else None

    def _follow(self, output: Sequence[int]) -> None:
        """Takes the output's tokens. Those below the limit are read at once, when it is reached:
        until then each token costs nothing."""
        size = len(self._seen)
        start = max(0, size - _LOOK_BACK)
        if size > len(output) or self._seen[start:] != list(output[start:size]):
            self._restart()
            size = 0
        while size < len(output) and not self._is_settled:
            if size < self._max_tokens and self._parser.is_open:
                # of these many none is forced, whatever they say
                self._take_thoughts(output[size : self._max_tokens])
            else:
                self._take(output[size])
            size = len(self._seen)

    def _take_thoughts(self, tokens: Sequence[int]) -> None:
        self._parser.push(self._texts.push(tokens))
        self._seen.extend(tokens)
        self._num_thoughts += len(tokens)
        self._is_settled = self._parser.is_over

    def _take(self, token: int) -> None:
        expected = self._next()
        if expected is not None:
            # another token: a grammar did not allow the forced one
            self._num_forced = self._num_forced + 1 if token == expected else 0
        elif self._parser.is_open:
            self._num_thoughts += 1
        text = self._texts.push((token,))
        self._seen.append(token)
        self._parser.push(text)
        if self._num_forced == len(self._closing):
            self._num_forced = 0
            self._is_settled = True
        elif self._parser.is_over:
            self._is_settled = not self._num_forced
        elif not self._parser.is_open:
            self._head += text
            head = self._head.lstrip()
            self._is_settled = bool(head) and not self._style.begin.startswith(head)
