"""llguidance's tokenizer and limits, and the trial of a grammar in a child process.

serve/sandbox/worker.py runs this script, and serve/structured/compiler.py imports it, so that the
server compiles a grammar exactly as the child process did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_MESSAGE_CHARS = 300
_TRIAL_TOKENS = 48
# The limits of a grammar in the compiler, in a step, and in memory (1 to 2 KB per lexer state).
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
    """A vocabulary in llguidance's interface. tokens: the bytes of each token."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        """encode: the model's tokenizer; None takes the longest token that fits at each step."""
        self.is_tokenizer_wrapper = True
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self._encode = encode
        self._greedy: Callable[[str], list[int]] | None = None

    def __call__(self, text: str) -> list[int]:
        """Tokenizes text that the grammar forces as the model's tokenizer does, provided that the
        bytes stay the same: a tokenizer may add a space in front."""
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
    """Makes llguidance's tokenizer, which takes about a second for a million tokens."""
    tokenizer = LLTokenizer(vocabulary, n_vocab=len(vocabulary.tokens), eos_token=list(eos_ids))
    vocabulary._greedy = tokenizer.greedy_tokenize
    return tokenizer


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Makes a matcher, which may be in its error state."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)


_NO_CHOICE = (
    "oneOf works only where no value can match two of its alternatives, such as objects with a "
    "required property whose const differs; use anyOf instead"
)
_LONG_QUOTE = re.compile(r'"([^"]{64})[^"]+"')


def problem_of(matcher: LLMatcher) -> str:
    """Returns the library's message, without its dump of the state and of the grammar."""
    words = matcher.get_error().split("<non-verbose/>")[0].split("<state>")[0]
    # lines of the grammar are indented, or numbered before a bar
    lines = [line for line in words.splitlines() if line[:1].strip() and " | " not in line]
    problem = _LONG_QUOTE.sub(r'"\1..."', " ".join(" ".join(lines).split()))
    if "coerce_one_of" in problem:
        return _NO_CHOICE
    if problem in ("", "NoExtension", "NoExtensionBias"):
        return "no text matches it"
    return problem.encode("ascii", "backslashreplace").decode()[:MAX_MESSAGE_CHARS]


# -- in the child process


def prepare(job: dict[str, Any]) -> LLTokenizer:
    """Makes the tokenizer of a job: tokens (bytes as Latin-1), special_ids, eos_ids."""
    tokens = [token.encode("latin-1") for token in job["tokens"]]
    vocabulary = Vocabulary(tokens, job["special_ids"], job["eos_ids"])
    return make_tokenizer(vocabulary, job["eos_ids"])


def start(tokenizer: LLTokenizer) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the function from {"grammar": ...} to {} or {"error": ...}."""

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        try:
            problem = _try_out(tokenizer, question["grammar"])
        except MemoryError:
            problem = "the grammar needs too much memory"
        return {"error": problem} if problem else {}

    return answer


def _try_out(tokenizer: LLTokenizer, grammar: str) -> str:
    """Compiles a grammar and follows one text, which reveals a grammar that no text matches."""
    matcher = make_matcher(tokenizer, grammar)
    for step in range(_TRIAL_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask or matcher.is_error():
            break
        # The library allows the id beyond the vocabulary, too, where it allows a special token.
        mask = mask & ~(1 << (tokenizer.vocab_size - 1)) or mask
        token = mask.bit_length() - 1 if step % 2 else (mask & -mask).bit_length() - 1
        if not matcher.consume_token(token):
            break
    return problem_of(matcher) if matcher.is_error() else ""
