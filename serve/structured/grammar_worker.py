"""llguidance's tokenizer and limits, and the child process that tries a grammar out.

Runs in a child (serve/sandbox/worker.py), and is imported by serve/structured/compiler.py:
whatever the child has found good is made the same way in the server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_MESSAGE_CHARS = 300
_TRIAL_TOKENS = 48
# What a grammar may cost: in the compiler, in one step, in memory (1 to 2 KB a lexer state).
_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=10_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)


class Vocabulary(TokenizerWrapper):
    """The tokens as llguidance asks for them. tokens: the bytes of each."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        """encode: as the model's tokenizer does; None: the longest token that fits comes next."""
        self.is_tokenizer_wrapper = True
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self._encode = encode
        self._greedy: Callable[[str], list[int]] | None = None

    def __call__(self, text: str) -> list[int]:
        """Text that the grammar forces is split the way the model has learned it, if that has
        the same bytes: a tokenizer may add a space in front."""
        want = text.encode()
        for mark in ("", "\x02") if self._encode is not None else ():
            ids = self._ids_behind(mark, text)
            if ids is not None and b"".join(map(self._bytes, ids)) == want:
                return ids
        assert self._greedy is not None
        return self._greedy(text)

    def _ids_behind(self, mark: str, text: str) -> list[int] | None:
        assert self._encode is not None
        ids, before = list(self._encode(mark + text)), list(self._encode(mark)) if mark else []
        return ids[len(before) :] if ids[: len(before)] == before else None

    def _bytes(self, token: int) -> bytes:
        return self.tokens[token] if token < len(self.tokens) else b""


def make_tokenizer(vocabulary: Vocabulary, eos_ids: Sequence[int]) -> LLTokenizer:
    """Slow for large vocabularies: about a second for a million tokens."""
    tokenizer = LLTokenizer(vocabulary, n_vocab=len(vocabulary.tokens), eos_token=list(eos_ids))
    vocabulary._greedy = tokenizer.greedy_tokenize
    return tokenizer


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """It may be in its error state."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)


_LONG_QUOTE = re.compile(r'"([^"]{64})[^"]+"')


def problem_of(matcher: LLMatcher) -> str:
    """In the library's words, without the state and the lines of the grammar that it adds."""
    words = matcher.get_error().split("<non-verbose/>")[0].split("<state>")[0]
    # lines that show the grammar are indented, or numbered before a bar
    lines = [line for line in words.splitlines() if line[:1].strip() and " | " not in line]
    problem = _LONG_QUOTE.sub(r'"\1..."', " ".join(" ".join(lines).split()))
    if problem in ("", "NoExtension", "NoExtensionBias"):
        return "no text fulfils it"
    return problem.encode("ascii", "backslashreplace").decode()[:MAX_MESSAGE_CHARS]


# -- in the child


def prepare(job: dict[str, Any]) -> LLTokenizer:
    """job: tokens (bytes as Latin-1), special_ids, eos_ids."""
    tokens = [token.encode("latin-1") for token in job["tokens"]]
    vocabulary = Vocabulary(tokens, job["special_ids"], job["eos_ids"])
    return make_tokenizer(vocabulary, job["eos_ids"])


def start(tokenizer: LLTokenizer) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """{"grammar": ...} -> {} or {"error": ...}."""

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        try:
            problem = _try_out(tokenizer, question["grammar"])
        except MemoryError:
            problem = "the grammar needs too much memory"
        return {"error": problem} if problem else {}

    return answer


def _try_out(tokenizer: LLTokenizer, grammar: str) -> str:
    """Compile and follow one text for a while: a grammar that no text fulfils shows soon."""
    matcher = make_matcher(tokenizer, grammar)
    for step in range(_TRIAL_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask or matcher.is_error():
            break
        token = mask.bit_length() - 1 if step % 2 else (mask & -mask).bit_length() - 1
        if not matcher.consume_token(token):
            break
    return problem_of(matcher) if matcher.is_error() else ""
