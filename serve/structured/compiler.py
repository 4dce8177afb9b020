"""Grammars of structured output, compiled: tried out in a child process first, then kept.

Everything is made at the first request that asks for it. Any thread; compiling takes its time, so
not the loop's and not the compute thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from serve.errors import RequestError
from serve.sandbox.worker import BoundedWorker, WorkerError
from serve.structured.grammar_source import PARAM, grammar_of, invalid
from serve.structured.grammar_worker import Vocabulary, make_matcher, make_tokenizer, problem_of
from serve.structured_output import StructuredOutput
from serve.text.tokenizer import Tokenizer

COMPILE_TIMEOUT_S = 2.0
COMPILE_MEMORY_BYTES = 256 << 20
# A child that did not answer may have had too little of a busy machine: asked again after this.
UNSURE_S = 60.0
MAX_GRAMMARS = 256
MAX_CACHE_BYTES = 64 << 20
# What a compiled grammar takes: measured, about 45 times its text, and the matcher itself.
_BYTES_PER_CHAR = 48
_BYTES_EACH = 64 << 10
_Key = tuple[str, str]


class GrammarCompiler:
    """The compiled grammars of one engine. vocab_size: width of the logits."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(token for token in eos_token_ids if token < vocab_size)
        self.cache = GrammarCache()
        self._making = threading.Lock()  # one at a time: several would only wait for the child
        self._ll_tokenizer: LLTokenizer | None = None
        self._worker = BoundedWorker(
            Path(__file__).with_name("grammar_worker.py"),
            self._job,
            name="compiling structured",
            timeout_s=COMPILE_TIMEOUT_S,
            memory_bytes=COMPILE_MEMORY_BYTES,
        )

    def knows(self, structured: StructuredOutput) -> bool:
        """Whether compile() answers at once."""
        return self.cache.get(structured) is not None

    def compile(self, structured: StructuredOutput) -> LLMatcher:
        """A matcher at the beginning of the text, the caller's own. RequestError, code
        "invalid_schema"."""
        found = self.cache.get(structured)
        self.cache.count(is_hit=found is not None)
        if found is None:
            with self._making:
                found = self.cache.get(structured) or self._make(structured)
        if isinstance(found, str):
            raise invalid(found)
        return found.deep_copy()

    def renewed(self, structured: StructuredOutput) -> LLMatcher:
        """Of a grammar that has been compiled: one that shares nothing with those before, and
        nor will those that come."""
        self.cache.drop(structured)
        assert self._ll_tokenizer is not None
        return make_matcher(self._ll_tokenizer, grammar_of(structured))

    def close(self) -> None:
        """Ends the child. Idempotent."""
        self._worker.close()

    def _make(self, structured: StructuredOutput) -> LLMatcher | str:
        grammar = grammar_of(structured)
        if self._tokenizer.pieces is None:
            raise RequestError(
                "this model's tokenizer does not say what text its tokens stand for, which "
                "structured needs",
                param=PARAM,
                code="unsupported_parameter",
            )
        try:
            problem = self._worker.ask({"grammar": grammar}).get("error")
        except WorkerError as error:
            found: LLMatcher | str = f"is too complex: {error}"
            self.cache.put(structured, found, UNSURE_S)
            return found
        found = f"cannot be used: {problem}" if problem else self._matcher(grammar)
        self.cache.put(structured, found)
        return found

    def _matcher(self, grammar: str) -> LLMatcher | str:
        if self._ll_tokenizer is None:
            vocabulary = self._vocabulary()
            self._ll_tokenizer = make_tokenizer(vocabulary, self._ends)
        matcher = make_matcher(self._ll_tokenizer, grammar)
        return f"cannot be used: {problem_of(matcher)}" if matcher.is_error() else matcher

    @property
    def _ends(self) -> list[int]:
        """Without an end the library does not work: then one beyond the logits."""
        return self._eos_ids or [self._vocab_size]

    def _tokens(self) -> list[bytes]:
        """One more than there are logits. Ids without a token have no text and never come."""
        assert self._tokenizer.pieces is not None
        tokens = self._tokenizer.pieces[: self._vocab_size]
        return tokens + [b""] * (self._vocab_size + 1 - len(tokens))

    def _special_ids(self) -> list[int]:
        special = {*self._tokenizer.special_ids, *self._ends, self._vocab_size}
        return sorted(token for token in special if token <= self._vocab_size)

    def _vocabulary(self) -> Vocabulary:
        encode = self._tokenizer.encode_plain
        return Vocabulary(self._tokens(), self._special_ids(), self._ends, encode)

    def _job(self) -> dict[str, object]:
        return {
            "tokens": [token.decode("latin-1") for token in self._tokens()],
            "special_ids": self._special_ids(),
            "eos_ids": self._ends,
        }


class GrammarCache:
    """The grammars used last, or what is wrong with them; bounded by number and bytes."""

    def __init__(self, max_entries: int = MAX_GRAMMARS, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, tuple[LLMatcher | str, int, float]] = OrderedDict()
        self.num_bytes = 0
        self.num_hits = self.num_misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, structured: StructuredOutput) -> LLMatcher | str | None:
        key = _key(structured)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or time.monotonic() > entry[2]:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def count(self, *, is_hit: bool) -> None:
        """A request asked for one, and it was there, or has to be made."""
        with self._lock:
            self.num_hits += is_hit
            self.num_misses += not is_hit

    def put(
        self, structured: StructuredOutput, found: LLMatcher | str, keep_s: float = math.inf
    ) -> None:
        size = len(found) if isinstance(found, str) else _BYTES_PER_CHAR * len(structured.source)
        size += _BYTES_EACH
        key = _key(structured)
        with self._lock:
            before = self._entries.pop(key, None)
            self.num_bytes += size - (before[1] if before else 0)
            self._entries[key] = found, size, time.monotonic() + keep_s
            while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
                self.num_bytes -= self._entries.popitem(last=False)[1][1]

    def drop(self, structured: StructuredOutput) -> None:
        with self._lock:
            entry = self._entries.pop(_key(structured), None)
            self.num_bytes -= entry[1] if entry else 0


def _key(structured: StructuredOutput) -> _Key:
    """Strings keep their hash: a call with a thousand prompts asks a thousand times."""
    return structured.kind, structured.source
