"""What the hop reads of a call's body: its prompt's length and blocks, and its answer's length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from serve.cluster.front.prefix_affinity import names_of, prompt_text

WHOLE_APART = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Calls that need not be streams to be parted."""
_STREAMS_APART = WHOLE_APART | {"/v1/messages", "/v1/responses"}
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# where they are set, the prompt is not to be taken from a cache, or is not in the body
_STAYS = (
    *("prompt_logprobs", "echo", "kv_transfer_params", "best_of"),
    *("previous_response_id", "conversation", "background"),
)
_FIRST_RATIO = 0.25  # tokens of a byte of text, until they are learned
_FIRST_OUTPUT = 128.0
_LEARNING = 0.05


class Prompt(NamedTuple):
    """names: of the blocks. size: of the text in bytes, or tokens if is_counted. is_stream: of the
    answer. most: the longest answer that is asked for, of all choices. can_part: the hop knows how
    the call goes on at another server."""

    names: list[bytes]
    size: int = 0
    is_counted: bool = False
    is_stream: bool = False
    most: int | None = None
    can_part: bool = False


NO_PROMPT = Prompt([])


def read_prompt(request: web.BaseRequest, body: bytes) -> Prompt:
    """Reads a body; of one that a replica will refuse it reads nothing."""
    try:
        value = orjson.loads(body)
    except ValueError:
        return NO_PROMPT
    if not isinstance(value, dict):
        return NO_PROMPT
    client = request.headers.get("Authorization") or request.headers.get("x-api-key") or ""
    try:
        text = prompt_text(value)
    except TypeError:
        return NO_PROMPT  # nested too deeply: the replica refuses it, too
    given = value.get("prompt")
    tokens = given if isinstance(given, list) else []
    is_counted = bool(tokens) and type(tokens[0]) is int
    is_stream = value.get("stream") is True
    return Prompt(
        names_of(text, client),
        len(tokens) if is_counted else len(text),
        is_counted,
        is_stream,
        _most(value),
        request.path in (_STREAMS_APART if is_stream else WHOLE_APART)
        and (is_counted or not isinstance(given, list))
        and not any(value.get(name) not in (None, False) for name in _STAYS),
    )


def _most(value: dict[str, Any]) -> int | None:
    given = [value[name] for name in _LENGTHS if type(value.get(name)) is int]
    number = value.get("n")
    return min(given) * (number if type(number) is int else 1) if given else None


def read_usage(body: bytes) -> tuple[int, int]:
    """Returns the tokens of the prompt and of the answer that an answer says it has; 0 where it
    says nothing."""
    try:
        usage = orjson.loads(body)["usage"]
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        cached = usage.get("cache_read_input_tokens", 0)  # not among the input_tokens then
        output = usage.get("completion_tokens", usage.get("output_tokens"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0, 0
    if not all(type(number) is int and number >= 0 for number in (prompt, cached, output)):
        return 0, 0  # embeddings have no answer
    return prompt + cached, output


@dataclass(slots=True)
class Lengths:
    """What was learned of lengths: tokens of a byte, and tokens of an answer."""

    of_byte: float = _FIRST_RATIO
    output: float = _FIRST_OUTPUT
    num_bytes_learned: int = 0
    num_outputs_learned: int = 0

    def of_prompt(self, prompt: Prompt) -> float:
        """Returns the tokens that a prompt probably has."""
        return float(prompt.size) if prompt.is_counted else self.of_byte * prompt.size

    def of_answer(self, prompt: Prompt) -> float:
        """Returns the tokens that its answer probably has."""
        return self.output if prompt.most is None else max(1.0, min(self.output, prompt.most))

    def learn(self, prompt: Prompt, num_tokens: int, num_output: int) -> None:
        """Learns from an answer that has ended. num_tokens: of its prompt, 0 if unknown."""
        if num_tokens and prompt.size and not prompt.is_counted:
            self.num_bytes_learned += 1
            part = max(_LEARNING, 1.0 / self.num_bytes_learned)  # the first ones count fully
            self.of_byte += part * (num_tokens / prompt.size - self.of_byte)
        if num_output:
            self.num_outputs_learned += 1
            part = max(_LEARNING, 1.0 / self.num_outputs_learned)
            self.output += part * (num_output - self.output)
