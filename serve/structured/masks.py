"""Makes the masks of a request's sequences from structured, allowed_token_ids, bad_words and
thinking_token_budget."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from serve.errors import RequestError
from serve.kept import Kept, size_of
from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.structured.bits import Bits, bits_of
from serve.structured.json_limits import JsonForm, JsonLimits
from serve.structured.mask_budget import MaskBudget
from serve.structured.reasoning_limit import (
    ReasoningEnd,
    ReasoningLimit,
    ReasoningLimits,
)
from serve.structured.token_mask import BadWords, Matcher, SequenceMask
from serve.structured_output import StructuredOutput
from serve.text.reasoning_prompt import is_reasoning_open
from serve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from serve.structured.compiler import GrammarCache, GrammarCompiler


_Lists = tuple[Collection[int] | None, Collection[str], tuple[Bits | None, BadWords | None]]


class MaskMaker:
    """Makes the masks of an engine. vocab_size: the width of the logits. bounded_json: see
    GrammarCompiler. reasoning: how the model's reasoning is ended; None if it has none that is
    marked. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        bounded_json: bool = True,
        reasoning: ReasoningEnd | None = None,
    ) -> None:
        self._bounded_json = bounded_json
        self._reasoning = reasoning
        self._reasoning_limits: ReasoningLimits | None = None
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
        if compiler is None:
            return True
        # of two forms, most models need the same one for each prompt
        forms = (structured.after_prompt(is_open=is_open) for is_open in (False, True))
        return not any(map(compiler.is_cached, forms))

    @property
    def compiler(self) -> GrammarCompiler:
        """The compiler, made on first use, since the import of its library takes 70 ms."""
        with self._lock:
            if self._compiler is None:
                from serve.structured.compiler import GrammarCompiler

                self._compiler = GrammarCompiler(
                    self._tokenizer,
                    self._vocab_size,
                    self._eos_ids,
                    bounded_json=self._bounded_json,
                )
            return self._compiler

    @property
    def grammars(self) -> GrammarCache | None:
        """The cache of grammars; None if no request has needed one."""
        return None if self._compiler is None else self._compiler.cache

    def kept(self) -> dict[str, Kept]:
        """Returns what is kept between requests. Any thread may call it."""
        last, grammars = self._last, self.grammars
        sizes = {"token_lists": size_of(() if last is None else last)}
        if grammars is not None:
            sizes["grammars"] = Kept(len(grammars), grammars.num_bytes)
        return sizes

    def worker_bytes(self) -> int:
        """Returns the resident memory of the process that tries grammars."""
        return 0 if self._compiler is None else self._compiler.worker_bytes()

    def make(self, request: Request, *, is_limited: bool = True) -> list[SequenceMask] | None:
        """Returns a mask for each of the n sequences, or None if all tokens are allowed.
        is_limited: whether the client has set max_tokens itself.

        Raises RequestError for an invalid grammar.
        """
        params = request.params
        allowed, words = params.allowed_token_ids, params.bad_words
        limits = self._limits(request)
        if params.structured is None and allowed is None and not words and not limits:
            return None
        size = self._vocab_size
        matcher, form = None, None
        if params.structured is not None:
            matcher, form = self._matcher(self._structured(request, params.structured))
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
                json=None
                if form is None
                else JsonLimits(form, params.max_tokens or 0, reports_cut=is_limited),
                reasoning=limits[index] if limits else None,
            )
            for index in range(params.n)
        ]

    def _limits(self, request: Request) -> list[ReasoningLimit]:
        """Returns the limits of reasoning of the request's sequences; none if it has no budget."""
        params = request.params
        budget = params.thinking_token_budget
        if budget is None or budget < 0 or not params.max_tokens:
            return []
        if self._reasoning is None:
            raise RequestError(
                "thinking_token_budget is not supported: the model has no reasoning that is marked",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        made = self._reasoning_limits
        if made is None:
            made = ReasoningLimits(self._tokenizer, self._reasoning)
            self._reasoning_limits = made
        is_open = self._is_open(request, self._reasoning)
        return [made.make(budget, is_open=is_open) for _ in range(params.n)]

    def _structured(self, request: Request, structured: StructuredOutput) -> StructuredOutput:
        """Returns the form of the text that follows this prompt."""
        end = self._reasoning
        if end is None or not structured.opened:
            return structured.after_prompt(is_open=False)
        return structured.after_prompt(is_open=self._is_open(request, end))

    def _is_open(self, request: Request, end: ReasoningEnd) -> bool:
        said, reasoning = request.params.is_reasoning_open, end.style.reasoning
        if said is not None or reasoning is None:
            return bool(said)
        return is_reasoning_open(self._tokenizer, reasoning, request.prompt_token_ids)

    def _matcher(self, structured: StructuredOutput) -> tuple[Matcher, JsonForm | None]:
        compiler = self.compiler
        grammar = compiler.grammar(structured)
        start = grammar.matcher.deep_copy()
        return Matcher(start, lambda: compiler.compile_unshared(structured)), grammar.json

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
