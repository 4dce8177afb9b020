"""Prompt lookup: a text that has come to words it had before goes on as it did then.

Each sequence has a suffix automaton of its prompt and answer (ops/csrc/suffix_index.h), which finds
the longest end that occurred before in constant time a token. It also follows the answers that the
same client got before under the same cache salt, and the prediction that its request came with;
the longest match proposes its continuation.
(Saxena, Prompt Lookup Decoding, 2023; Hu et al., SAM Decoding, arXiv 2411.10666.)
"""

from __future__ import annotations

import collections.abc as abc
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from ops.cpu import native_library
from serve.scheduler.sequence import Sequence
from serve.speculation.drafter import Draft

_LEAST_MATCH = 2
# Kinds of drafts: matches from so many tokens on, in the sequence's own text, in other answers and
# in its prediction.
_MATCHES = (_LEAST_MATCH, 4, 8, 16)
_GUESSES = (0.3, 0.5, 0.7, 0.85)
_PREDICTED_GUESSES = (0.6, 0.7, 0.8, 0.9)
# Answers are kept of the last _MOST_CLIENTS clients. An index of _CLIENT_TOKENS takes 3.5 MB; it is
# made anew, with the last half of the answers, when it is full.
_MOST_CLIENTS = 16
_CLIENT_TOKENS = 32768
_LEAST_ANSWER = 16
_SEPARATOR = -1
# The tokens with which a new sequence is looked for in earlier answers.
_FIRST_TOKENS = 32
_TOKENS_A_STEP = 4096  # a millisecond

Client = tuple[str | None, str | None]


def is_available() -> bool:
    """Returns whether the native library, which has the suffix automaton, is built."""
    return native_library.is_available()


class _Answers:
    """The last answers of one client."""

    def __init__(self) -> None:
        self._texts: deque[list[int]] = deque()
        self.index: Any = native_library.library().SuffixIndex()

    def add(self, token_ids: list[int]) -> None:
        text = [_SEPARATOR, *token_ids[-_CLIENT_TOKENS // 2 :]]
        self._texts.append(text)
        if self.index.size + len(text) <= _CLIENT_TOKENS:
            self.index.extend(text)
            return
        kept = sum([len(each) for each in self._texts])
        while kept > _CLIENT_TOKENS // 2:
            kept -= len(self._texts.popleft())
        self.index = native_library.library().SuffixIndex()  # cursors keep the one they follow
        for each in self._texts:
            self.index.extend(each)


class _Predicted:
    """The prediction of one sequence's answer, and where the answer is in it."""

    def __init__(self, token_ids: abc.Sequence[int]) -> None:
        library = native_library.library()
        self._token_ids = token_ids
        self._num_indexed = 0
        self.index: Any = library.SuffixIndex()
        self._cursor: Any = library.SuffixCursor(self.index)

    def advance(self, answer: list[int]) -> None:
        """Takes new tokens of the answer; a long prediction is indexed in several steps."""
        begin = self._num_indexed
        if begin < len(self._token_ids):
            self._num_indexed = begin + _TOKENS_A_STEP
            self.index.extend(list(self._token_ids[begin : self._num_indexed]))
        self._cursor.advance(answer)

    def follow(self, least: int, most: int, answer: list[int]) -> tuple[int, list[int]]:
        """Returns how many of the last tokens the prediction has, and what follows them there. The
        first token of the answer is enough where it is the first one of the prediction."""
        if len(answer) == 1 and answer[0] == self._token_ids[0]:
            return 1, list(self._token_ids[1 : 1 + most])
        found: tuple[int, list[int]] = self._cursor.follow(least, most)
        return found


@dataclass(slots=True)
class _Text:
    """What is kept of one sequence. num_seen: its tokens in the index."""

    index: Any
    cursor: Any | None
    num_seen: int = 0
    predicted: _Predicted | None = None

    def follow(self, token_ids: list[int], num_prompt: int) -> bool:
        """Takes new tokens; returns whether all of them, as a long prompt takes several steps."""
        begin = self.num_seen
        new = token_ids[begin : begin + _TOKENS_A_STEP]
        self.index.extend(new)
        self.num_seen = begin + len(new)
        if self.cursor is not None:
            self.cursor.advance(new if begin else new[-_FIRST_TOKENS:])
        if self.predicted is not None:
            self.predicted.advance(new[max(0, num_prompt - begin) :])
        return self.num_seen == len(token_ids)


class PromptLookup:
    """A Drafter that needs no model."""

    first_guesses = _GUESSES + _GUESSES + _PREDICTED_GUESSES

    def __init__(self) -> None:
        self._library = native_library.library()
        self._texts: dict[Sequence, _Text] = {}
        self._clients: OrderedDict[Client, _Answers] = OrderedDict()

    def propose(self, sequences: abc.Sequence[Sequence], most: int) -> list[Draft | None]:
        return [self._propose(sequence, most) for sequence in sequences]

    def _propose(self, sequence: Sequence, most: int) -> Draft | None:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = self._begin(sequence)
        num_prompt = sequence.num_prompt_tokens
        if not text.follow(sequence.token_ids, num_prompt):
            return None
        length, tokens = text.index.follow(_LEAST_MATCH, most)
        kind = 0
        if text.cursor is not None:
            other, others = text.cursor.follow(max(_LEAST_MATCH, length + 1), most)
            if others:
                length, tokens, kind = other, others, len(_MATCHES)
        is_predicted = False
        if text.predicted is not None:
            answer = sequence.token_ids[num_prompt : num_prompt + 2]
            other, others = text.predicted.follow(max(_LEAST_MATCH, length), most, answer)
            if others:
                length, tokens, kind, is_predicted = other, others, 2 * len(_MATCHES), True
        if not tokens:
            return None
        kind += sum([length >= least for least in _MATCHES[1:]])
        return Draft(tokens, kind, is_predicted)

    def _begin(self, sequence: Sequence) -> _Text:
        answers = self._clients.get(_client_of(sequence))
        cursor = None if answers is None else self._library.SuffixCursor(answers.index)
        text = _Text(self._library.SuffixIndex(), cursor)
        prediction = sequence.request.prediction
        if prediction is not None and prediction.token_ids:
            text.predicted = _Predicted(prediction.token_ids)
        return text

    @property
    def kept_bytes(self) -> tuple[int, int]:
        texts = [*self._texts.values()]
        predicted = [text.predicted for text in texts if text.predicted is not None]
        indexes = [text.index for text in texts] + [each.index for each in predicted]
        indexes += [answers.index for answers in [*self._clients.values()]]
        return len(indexes), sum([index.bytes for index in indexes])

    def ended(self, sequence: Sequence) -> None:
        text = self._texts.pop(sequence, None)
        answer = sequence.token_ids[sequence.num_prompt_tokens :]
        if text is None or len(answer) < _LEAST_ANSWER:
            return
        client = _client_of(sequence)
        answers = self._clients.pop(client, None) or _Answers()
        self._clients[client] = answers
        answers.add(answer)
        if len(self._clients) > _MOST_CLIENTS:
            self._clients.popitem(last=False)


def _client_of(sequence: Sequence) -> Client:
    request = sequence.request
    return request.client, request.params.cache_salt
