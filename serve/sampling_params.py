"""`SamplingParams` and its limits.

Values are checked once, when the object is made, and trusted by all other code. Nothing here
knows HTTP.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import NamedTuple

from memory.policies.setting import OFF, parse_kv_policy
from serve.errors import RequestError
from serve.parameter_checks import as_tuple, check_float, check_int, check_length
from serve.structured_output import StructuredOutput

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
UNBOUNDED = -1  # of thinking_token_budget
SEED_LIMIT = 1 << 63
PRIORITY_LIMIT = 1 << 31
_SALT = re.compile(r"[A-Za-z0-9_-]{1,128}")


class TokenScores(NamedTuple):
    """The log-probability of a token, its rank, and those of the most likely ones by token id."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerSoFar:
    """The tokens that a sequence has got from another engine, after which it goes on here.
    finish_reason: "stop" or "length" if it had ended with the last of them; None if it had not.
    scores: of each token, where the answer is to have them; none: they are not known. One without
    tokens begins anew."""

    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    scores: tuple[TokenScores, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", as_tuple("token_ids", self.token_ids))
        if self.scores and len(self.scores) != len(self.token_ids):
            raise RequestError("there must be scores of all tokens", param="answers_so_far")
        if self.finish_reason not in (None, "stop", "length"):
            raise RequestError(
                'finish_reason must be "stop", "length" or null', param="answers_so_far"
            )
        if not self.token_ids:  # it begins anew, and ends for the same reason
            object.__setattr__(self, "finish_reason", None)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Determines how tokens are sampled and when a sequence ends.

    max_tokens: None means up to the model's context. default_max_tokens: the bound where
    max_tokens is None. temperature: 0 is greedy. top_k: 0 and -1 mean off.
    logprobs: the number of alternatives per token (0: only the sampled token; None: off).
    prompt_logprobs: the same for the prompt's tokens after the first, which has no prediction;
    with it max_tokens may be 0, and only the prompt is computed.
    seed: the same seed and prompt give the same tokens in any batch; None draws a seed.
    logit_bias: token id -> value added to its logit. allowed_token_ids: only these are sampled.
    bad_words: texts that are never generated. structured: the form of the text.
    shown_special_tokens: special tokens that are part of the text although skip_special_tokens
    is set, for parsers of the model's markup.
    cache_salt: a prefix is shared only between requests with the same salt.
    kv_policy: "off" reads and keeps all K/V where the engine's kv_policy selects or drops some; a
    budget of its own, such as "quest:budget=25%", where the engine selects; where it drops K/V, any
    policy that does, such as "h2o:budget=25%"; None: as the engine does.
    priority: where the engine's order is "priority", a lower one runs first.
    thinking_token_budget: the most tokens of reasoning; then the model is made to end it. 0: no
    reasoning; -1: no bound; None: not said, which is the engine's default in chats.
    is_reasoning_open: whether the prompt ends inside the reasoning; None looks at its end.
    prediction: a text that the answer is expected to repeat in large part; drafts come from it.
    awaits_prefill: another engine of kv_peers computes the prompt at this moment: its K/V is pulled
    as it is computed, and only what does not come is computed here.
    answers_so_far: one for each of the n sequences, or none. An engine with the same model goes on
    with the token that the first engine would have sampled next; it needs the same seed. What it
    answers begins with the tokens so far, without their log-probabilities.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str | None = ()
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[str, ...] = ()
    cache_salt: str | None = None
    priority: int = 0
    default_max_tokens: int | None = None
    structured: StructuredOutput | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] = ()
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    is_reasoning_open: bool | None = None
    prediction: str | None = None
    awaits_prefill: bool = False
    answers_so_far: tuple[AnswerSoFar, ...] = ()
    kv_policy: str | None = None

    def __post_init__(self) -> None:
        stop = self.stop
        stops = () if stop is None else (stop,) if isinstance(stop, str) else stop
        object.__setattr__(self, "stop", as_tuple("stop", stops))
        object.__setattr__(
            self, "stop_token_ids", as_tuple("stop_token_ids", self.stop_token_ids or ())
        )
        check_int("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 0, SEED_LIMIT)
        if self.default_max_tokens is not None:
            check_int("default_max_tokens", self.default_max_tokens, 1, SEED_LIMIT)
        check_int("min_tokens", self.min_tokens, 0, SEED_LIMIT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        check_float("temperature", self.temperature, 0.0, 2.0)
        check_float("top_p", self.top_p, 0.0, 1.0)
        check_int("top_k", self.top_k, -1, 1 << 31)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 1e-2, 100.0)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            check_int("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.thinking_token_budget is not None:
            check_int("thinking_token_budget", self.thinking_token_budget, UNBOUNDED, SEED_LIMIT)
        if self.prediction is not None and not (self.prediction and type(self.prediction) is str):
            raise RequestError("prediction must be a text that is not empty", param="prediction")
        if self.kv_policy not in (None, OFF):
            self._check_kv_policy()
        check_int("priority", self.priority, -PRIORITY_LIMIT, PRIORITY_LIMIT - 1)
        if self.answers_so_far and len(self.answers_so_far) != self.n:
            raise RequestError(
                f"answers_so_far has {len(self.answers_so_far)} entries, and n is {self.n}",
                param="answers_so_far",
            )
        self._check_stops()
        self._check_logit_bias()
        self._check_cache_salt()
        self._check_masks()

    def _check_kv_policy(self) -> None:
        try:
            parse_kv_policy(self.kv_policy)
        except ValueError as error:
            raise RequestError(f"kv_policy {error}", param="kv_policy") from None

    def _check_stops(self) -> None:
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has more than {MAX_STOP_STRINGS} strings",
                param="stop",
                code="array_above_max_length",
            )
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise RequestError("stop must hold non-empty strings", param="stop")
            if len(text) > MAX_STOP_LENGTH:
                raise RequestError(
                    f"a stop string is longer than {MAX_STOP_LENGTH} characters",
                    param="stop",
                    code="string_above_max_length",
                )
        if len(self.stop_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids has more than {MAX_STOP_TOKEN_IDS} entries",
                param="stop_token_ids",
                code="array_above_max_length",
            )
        for token in self.stop_ids:
            check_int("stop_token_ids", token, 0, 1 << 31)

    def _check_logit_bias(self) -> None:
        if not self.logit_bias:
            return
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has more than {MAX_LOGIT_BIAS} entries",
                param="logit_bias",
                code="array_above_max_length",
            )
        for token, value in self.logit_bias.items():
            check_int("logit_bias", token, 0, 1 << 31)
            check_float("logit_bias", value, -100.0, 100.0)

    def _check_cache_salt(self) -> None:
        salt = self.cache_salt
        if salt is not None and not (isinstance(salt, str) and _SALT.fullmatch(salt)):
            raise RequestError(
                "cache_salt must be 1 to 128 letters, digits, - or _", param="cache_salt"
            )

    def _check_masks(self) -> None:
        object.__setattr__(self, "bad_words", as_tuple("bad_words", self.bad_words or ()))
        check_length("bad_words", self.bad_words, MAX_BAD_WORDS)
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise RequestError("bad_words must hold words", param="bad_words")
            if len(word) > MAX_BAD_WORD_LENGTH:
                raise RequestError(
                    f"a bad word is longer than {MAX_BAD_WORD_LENGTH} characters",
                    param="bad_words",
                    code="string_above_max_length",
                )
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise RequestError(
                f"structured must be a StructuredOutput, not {type(self.structured).__name__}",
                param="structured",
                code="invalid_type",
            )
        if self.allowed_token_ids is None:
            return
        allowed = as_tuple("allowed_token_ids", self.allowed_token_ids)
        object.__setattr__(self, "allowed_token_ids", allowed)
        if not allowed:
            raise RequestError("allowed_token_ids is empty", param="allowed_token_ids")
        if self.structured is not None:
            raise RequestError(
                "allowed_token_ids cannot be used together with structured",
                param="allowed_token_ids",
            )
        check_length("allowed_token_ids", allowed, MAX_ALLOWED_TOKEN_IDS)
        if not all(type(token) is int and 0 <= token < 1 << 31 for token in allowed):
            for token in allowed:  # finds the wrong one and raises
                check_int("allowed_token_ids", token, 0, 1 << 31)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # normalized in __post_init__

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.stop_token_ids  # type: ignore[return-value]  # normalized in __post_init__

    @property
    def is_greedy(self) -> bool:
        """Whether the temperature is 0 or too small to divide by."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def most_tokens(self, room: int) -> int:
        """Returns the most tokens of the answer. room: what the context has for it."""
        if self.max_tokens is not None:
            return self.max_tokens
        return room if self.default_max_tokens is None else min(room, self.default_max_tokens)

    def changed(self, **changes: object) -> SamplingParams:
        """Returns a copy with other values, which must be valid.

        They are not checked again: lists may be long, and a call may have a thousand prompts.
        """
        copy = object.__new__(SamplingParams)
        for name in _PARAMETERS:
            value = changes[name] if name in changes else getattr(self, name)
            object.__setattr__(copy, name, value)
        return copy


_PARAMETERS = tuple(item.name for item in fields(SamplingParams))
