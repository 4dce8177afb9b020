"""Compiles the grammars of structured output, after a trial in a child process, and caches them.

A grammar is compiled at the first request for it. Compilation is slow, so that neither the event
loop nor the compute thread may call it; any other thread may.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from serve.errors import OverloadedError, RequestError
from serve.sandbox.worker import BoundedWorker, WorkerError, WorkerLostError
from serve.structured.grammar_source import grammar_of
from serve.structured.grammar_worker import Vocabulary, make_matcher, make_tokenizer, problem_of
from serve.structured.json_limits import JsonForm
from serve.structured.json_tokens import JsonTokens
from serve.structured.refusal import INVALID_SCHEMA, PARAM, invalid
from serve.structured.schema_ends import pattern_ends, required_names, shortest_sizes
from serve.structured.schema_walk import Work
from serve.structured_output import StructuredOutput
from serve.text.tokenizer import Tokenizer

COMPILE_TIMEOUT_S = 2.0
COMPILE_MEMORY_BYTES = 256 << 20
# A child process without an answer may have run on a busy machine: its verdict is kept this long.
UNSURE_S = 60.0
MAX_GRAMMARS = 256
MAX_CACHE_BYTES = 64 << 20
# The memory of a compiled grammar, as measured: about 45 times its text, and the matcher itself.
_BYTES_PER_CHAR = 48
_BYTES_EACH = 64 << 10
_CALL = 40  # tokens that begin another tool call, about
_MAX_NAMES = 64
_TEXT_RULE = re.compile(
    r'^r_\d+(?:\[lazy\])?: T_\d+ (?:("(?:[^"\\]|\\.)*")|<\[(\d+)\]>)$', re.MULTILINE
)
_Key = tuple[str, str, bool | None, bool]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar. matcher: at the beginning of the text, never advanced. text: what it was
    compiled from. json: the limits of its JSON, if it is bounded."""

    matcher: LLMatcher
    text: str
    json: JsonForm | None = None


class GrammarCompiler:
    """The compiled grammars of an engine. vocab_size: the width of the logits. bounded_json: what
    holds for requests that do not say."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        bounded_json: bool = True,
    ) -> None:
        self._bounded_json = bounded_json
        self._json_tokens: JsonTokens | None = None
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(token for token in eos_token_ids if token < vocab_size)
        self.cache = GrammarCache()
        self._compiling = threading.Lock()  # one at a time, since there is one child process
        self._ll_tokenizer: LLTokenizer | None = None
        self._worker = BoundedWorker(
            Path(__file__).with_name("grammar_worker.py"),
            self._job,
            name="compiling structured",
            timeout_s=COMPILE_TIMEOUT_S,
            memory_bytes=COMPILE_MEMORY_BYTES,
        )

    def is_cached(self, structured: StructuredOutput) -> bool:
        """Returns whether compile() returns at once."""
        return self.cache.get(structured) is not None

    def compile(self, structured: StructuredOutput) -> LLMatcher:
        """Returns a new matcher at the beginning of the text.

        Raises RequestError with code "invalid_schema".
        """
        return self.grammar(structured).matcher.deep_copy()

    def grammar(self, structured: StructuredOutput) -> Grammar:
        """Returns the compiled grammar, which requests share. Raises as compile() does."""
        result = self.cache.get(structured)
        self.cache.count(is_hit=result is not None)
        if result is None:
            with self._compiling:
                result = self.cache.get(structured) or self._compile_or_refuse(structured)
        if isinstance(result, str):
            raise invalid(result)
        return result

    def compile_unshared(self, structured: StructuredOutput) -> LLMatcher:
        """Drops a valid grammar from the cache and compiles it again, with a lexer of its own."""
        grammar = self.grammar(structured)
        self.cache.drop(structured)
        assert self._ll_tokenizer is not None
        return make_matcher(self._ll_tokenizer, grammar.text)

    def worker_bytes(self) -> int:
        """Returns the resident memory of the child process."""
        return self._worker.resident_bytes()

    def close(self) -> None:
        """Ends the child process. Idempotent."""
        self._worker.close()

    def _compile_or_refuse(self, structured: StructuredOutput) -> Grammar | str:
        """Keeps a refusal, too, which may take as long as compiling."""
        try:
            return self._compile(structured)
        except RequestError as error:
            if error.code == INVALID_SCHEMA:
                self.cache.put(structured, str(error).removeprefix(f"{PARAM} "))
            raise

    def _compile(self, structured: StructuredOutput) -> Grammar | str:
        is_bounded = structured.bounded
        if is_bounded is None:
            is_bounded = structured.kind != "grammar" and self._bounded_json
        schemas: list[Any] = []
        text = grammar_of(structured, closed=is_bounded, schemas=schemas)
        if self._tokenizer.pieces is None:
            raise RequestError(
                "structured needs the text of each token, which this model's tokenizer does not "
                "give",
                param=PARAM,
                code="unsupported_parameter",
            )
        try:
            problem = self._problem(text)
            if problem and is_bounded and text != (whole := grammar_of(structured)):
                # the library may not be able to close these objects
                text, problem = whole, self._problem(whole)
        except WorkerLostError as error:
            raise OverloadedError(f"{PARAM} cannot be compiled now: {error}") from None
        except WorkerError as error:
            result: Grammar | str = f"is too complex: {error}"
            self.cache.put(structured, result, UNSURE_S)
            return result
        result = f"cannot be used: {problem}" if problem else self._matcher(text)
        if isinstance(result, Grammar) and is_bounded and (schemas or _closers(structured)):
            result = replace(result, json=self._json_form(structured, schemas))
        self.cache.put(structured, result)
        return result

    def _problem(self, grammar: str) -> str:
        return str(self._worker.ask({"grammar": grammar}).get("error") or "")

    def _matcher(self, grammar: str) -> Grammar | str:
        if self._ll_tokenizer is None:
            vocabulary = self._vocabulary()
            self._ll_tokenizer = make_tokenizer(vocabulary, self._ends)
        matcher = make_matcher(self._ll_tokenizer, grammar)
        if matcher.is_error():
            return f"cannot be used: {problem_of(matcher)}"
        return Grammar(matcher, grammar)

    def _json_form(self, structured: StructuredOutput, schemas: list[Any]) -> JsonForm:
        assert self._ll_tokenizer is not None
        if self._json_tokens is None:
            self._json_tokens = JsonTokens(self._tokens(), self._ll_tokenizer.tokenize_str)
        tokens = self._json_tokens
        count = tokens.counter()
        work = Work()
        sizes = [shortest_sizes(schema, count, work) for schema in schemas]
        names = [f'{name}"' for name in (pattern_ends(schemas) | required_names(schemas))]
        return JsonForm(
            tokens,
            growth=max((longest for _, longest in sizes), default=0) + 2,
            again=_CALL + int(max((size for size, _ in sizes), default=0))
            if structured.kind == "grammar"
            else 0,
            names=tuple(ids for name in names[:_MAX_NAMES] if (ids := tokens.spelled(name))),
            closers=tuple(
                ids
                for text in _closers(structured)
                if (ids := [text] if isinstance(text, int) else tokens.spelled(text))
            ),
            completes=structured.completes,
        )

    @property
    def _ends(self) -> list[int]:
        """The EOS ids, or an id beyond the logits, since the library needs one."""
        return self._eos_ids or [self._vocab_size]

    def _tokens(self) -> list[bytes]:
        """Returns the bytes of vocab_size + 1 ids; ids without a token have none."""
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
    """An LRU cache of compiled grammars, or of the reasons why they are invalid."""

    def __init__(self, max_entries: int = MAX_GRAMMARS, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, tuple[Grammar | str, int, float]] = OrderedDict()
        self.num_bytes = 0
        self.num_hits = self.num_misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, structured: StructuredOutput) -> Grammar | str | None:
        key = _key(structured)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or time.monotonic() > entry[2]:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def count(self, *, is_hit: bool) -> None:
        """Counts a request that found its grammar here or not."""
        with self._lock:
            self.num_hits += is_hit
            self.num_misses += not is_hit

    def put(
        self, structured: StructuredOutput, result: Grammar | str, keep_s: float = math.inf
    ) -> None:
        size = len(result) if isinstance(result, str) else _BYTES_PER_CHAR * len(result.text)
        size += _BYTES_EACH
        key = _key(structured)
        with self._lock:
            before = self._entries.pop(key, None)
            self.num_bytes += size - (before[1] if before else 0)
            self._entries[key] = result, size, time.monotonic() + keep_s
            while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
                self.num_bytes -= self._entries.popitem(last=False)[1][1]

    def drop(self, structured: StructuredOutput) -> None:
        with self._lock:
            entry = self._entries.pop(_key(structured), None)
            self.num_bytes -= entry[1] if entry else 0


def _closers(structured: StructuredOutput) -> list[str | int]:
    """Returns the markers after the plain texts of a grammar of ours: texts, or ids of tokens. A
    rule of such a text has a terminal, the marker and nothing else, and no name of its own."""
    if structured.kind != "grammar":
        return []
    found: dict[str | int, None] = {}
    for match in _TEXT_RULE.finditer(structured.source):
        found[int(match[2]) if match[2] else str(json.loads(match[1]))] = None
    return list(found)


def _key(structured: StructuredOutput) -> _Key:
    """Returns a key with strings, which keep their hash when a call has a thousand prompts."""
    return structured.kind, structured.source, structured.bounded, structured.completes
