"""The forms of a workload: `Call` (lengths and a time), `Work` (a request), and `Schedule`.

A million calls are cheap, as they have no prompt; prompts.py makes works of those that are really
sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

Run = tuple[int, int]  # (id, tokens): prompts with equal ids begin with the same tokens


@dataclass(frozen=True, slots=True)
class Work:
    """A request to send: exactly one of messages (a conversation), prompt and token_ids is given.

    max_tokens of None leaves the limit to the server. With ignore_eos the answer has exactly
    max_tokens. client is the user or application (an API's `user`). group names the requests that
    belong together (a session, a shared prefix).
    """

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    client: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        contents = [self.messages, self.prompt, self.token_ids]
        assert sum(part is not None for part in contents) == 1, "messages, prompt or token_ids"


@dataclass(frozen=True, slots=True)
class Schedule:
    """works[i] is due arrivals_s[i] seconds after the start, in ascending order. qps is the mean
    rate; it is infinite if all are due at once."""

    qps: float
    works: list[Work]
    arrivals_s: list[float]

    def __post_init__(self) -> None:
        assert len(self.works) == len(self.arrivals_s), "each work has a time"


@dataclass(frozen=True, slots=True)
class Call:
    """A request's lengths, in tokens, and its time.

    num_output is the answer's length, None if the model decides. max_tokens is the limit that the
    client sends, which may cut the answer, or None. The request is due at at_s, in the trace's own
    time or, after make_calls, in that of the schedule. runs are the beginning of the prompt; the
    rest of num_prompt is not shared. work is the request itself if the data set has its text;
    num_prompt is then an estimate.
    """

    num_prompt: int
    num_output: int | None
    max_tokens: int | None = None
    at_s: float | None = None
    client: str | None = None
    group: str | None = None
    runs: tuple[Run, ...] = ()
    work: Work | None = None


def fit_lengths(num_prompt: int, num_output: int, max_model_len: int) -> tuple[int, int]:
    """Cuts both lengths so that their sum is at most max_model_len: first the answer, to no less
    than half of max_model_len, then the prompt."""
    if num_prompt + num_output <= max_model_len:
        return num_prompt, num_output
    num_output = min(num_output, max(max_model_len // 2, max_model_len - num_prompt))
    return min(num_prompt, max_model_len - num_output), num_output


def fit_context(calls: Iterable[Call], max_model_len: int | None, notes: list[str]) -> list[Call]:
    """Cuts made-up prompts to the context, and leaves out texts that do not fit. Adds notes."""
    kept: list[Call] = []
    num_cut = num_left_out = 0
    for call in calls:
        output = call.num_output or 1
        if max_model_len is None or call.num_prompt + output <= max_model_len:
            kept.append(_bounded(call, max_model_len))
        elif call.work is not None:
            num_left_out += 1
        else:
            num_cut += 1
            prompt, output = fit_lengths(call.num_prompt, output, max_model_len)
            cut = replace(
                call, num_prompt=prompt, num_output=output, runs=cut_runs(call.runs, prompt)
            )
            kept.append(_bounded(cut, max_model_len))
    if num_cut:
        notes.append(f"requests cut to max_model_len {max_model_len}: {num_cut}")
    if num_left_out:
        notes.append(
            f"requests left out, as they exceed max_model_len {max_model_len}: {num_left_out}"
        )
    return kept


def _bounded(call: Call, max_model_len: int | None) -> Call:
    """Cuts a made-up request's max_tokens to the context, since servers refuse a larger one."""
    if max_model_len is None or call.max_tokens is None or call.work is not None:
        return call
    room = max_model_len - call.num_prompt
    return call if call.max_tokens <= room else replace(call, max_tokens=room)


def cut_runs(runs: tuple[Run, ...], num_prompt: int) -> tuple[Run, ...]:
    """Returns the runs of the first num_prompt tokens."""
    kept = []
    for key, length in runs:
        if num_prompt <= 0:
            break
        kept.append((key, min(length, num_prompt)))
        num_prompt -= length
    return tuple(kept)
