"""Makes the masks of a request's sequences from structured, allowed_token_ids and bad_words."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.structured.token_mask import BadWords, Bits, MaskBudget, Matcher, SequenceMask, bits_of
from serve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from serve.structured.compiler import GrammarCache, GrammarCompiler


_Lists = tuple[Collection[int] | None, Collection[str], tuple[Bits | None, BadWords | None]]


class MaskMaker:
    """Makes the masks of an engine. vocab_size: the width of the logits. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_token_ids)
        self._last: _Lists | None = None

    def is_slow(self, params: SamplingParams) -> bool:
        """Returns whether make() has to compile a grammar."""
        structured, compiler = params.structured, self._compiler
        if structured is None:
            return False
        return compiler is None or not compiler.is_cached(structured)

    @property
    def compiler(self) -> GrammarCompiler:
        """The compiler, made on first use, since the import of its library takes 70 ms."""
        with self._lock:
            if self._compiler is None:
                from serve.structured.compiler import GrammarCompiler

                self._compiler = GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_ids)
            return self._compiler

    @property
    def grammars(self) -> GrammarCache | None:
        """The cache of grammars; None if no request has needed one."""
        return None if self._compiler is None else self._compiler.cache

    def make(self, request: Request) -> list[SequenceMask] | None:
        """Returns a mask for each of the n sequences, or None if all tokens are allowed.

        Raises RequestError for an invalid grammar.
        """
        params = request.params
        allowed, words = params.allowed_token_ids, params.bad_words
        if params.structured is None and allowed is None and not words:
            return None
        size = self._vocab_size
        matcher = None
        structured = params.structured
        if structured is not None:
            compiler = self.compiler
            matcher = Matcher(
                compiler.compile(structured), lambda: compiler.compile_unshared(structured)
            )
        bits, bad_words = self._lists(allowed, words)
        stops = frozenset(params.stop_ids)
        budget = MaskBudget(size)
        return [
            SequenceMask(
                size,
                num_prompt=len(request.prompt_token_ids),
                matcher=None if matcher is None else matcher.copy(),
                allowed=bits,
                bad_words=bad_words,
                eos_ids=self._eos_ids,
                stop_ids=stops if params.ignore_eos else stops | self._eos_ids,
                min_output=params.min_tokens,
                budget=budget,
            )
            for _ in range(params.n)
        ]

    def _lists(
        self, allowed: Collection[int] | None, words: Collection[str]
    ) -> tuple[Bits | None, BadWords | None]:
        """Returns the bits and words of these lists, which all prompts of a call share."""
        last = self._last
        if last is not None and last[0] is allowed and last[1] is words:
            return last[2]
        result = (
            None if allowed is None else bits_of(allowed, self._vocab_size),
            BadWords(self._spellings(words), self._vocab_size) if words else None,
        )
        self._last = allowed, words, result
        return result

    def _spellings(self, words: Iterable[str]) -> set[tuple[int, ...]]:
        """Returns the tokens of each word, at the beginning of a text and after a space."""
        encode = self._tokenizer.encode_plain
        spellings = (text for word in words for text in (word.lstrip(), " " + word.lstrip()))
        return {tuple(encode(text)) for text in spellings}

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
