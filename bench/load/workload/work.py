"""The forms of a workload: `Call` (lengths and a time), `Work` (a request) and `Schedule`.

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
    """One request: exactly one of messages (a conversation), prompt and token_ids is given.

    max_tokens: None leaves it to the server. ignore_eos: the answer has exactly max_tokens.
    client: who or which application asks (an API's `user`). group: requests of one group belong
    together (a session, a shared prefix).
    """

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    token_ids: list[int] | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    client: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        given = [self.messages, self.prompt, self.token_ids]
        assert sum(part is not None for part in given) == 1, "one of them"


@dataclass(frozen=True, slots=True)
class Schedule:
    """works[i] is due arrivals_s[i] seconds after the start; ascending. qps: offered on average;
    infinite: all at once."""

    qps: float
    works: list[Work]
    arrivals_s: list[float]

    def __post_init__(self) -> None:
        assert len(self.works) == len(self.arrivals_s), "one time for each"


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    num_output: the answer's own length; None: the model decides. max_tokens: what the client
    sends, which may cut the answer; None: it sends none. at_s: when it is due, in the trace's own
    time or (make_calls) in the schedule's. runs: what the prompt begins with; what they leave of
    num_prompt is the request's own. work: the request itself, where the data set has its text;
    num_prompt is then estimated.
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
    """Together at most max_model_len: the answer is cut to half of it at most, then the prompt."""
    if num_prompt + num_output <= max_model_len:
        return num_prompt, num_output
    num_output = min(num_output, max(max_model_len // 2, max_model_len - num_prompt))
    return min(num_prompt, max_model_len - num_output), num_output


def fit_context(calls: Iterable[Call], max_model_len: int | None, notes: list[str]) -> list[Call]:
    """Made-up prompts are cut to the context; a text that does not fit is left out."""
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
            f"requests left out, longer than max_model_len {max_model_len}: {num_left_out}"
        )
    return kept


def _bounded(call: Call, max_model_len: int | None) -> Call:
    """Made-up requests do not ask for more than there is room for: servers refuse that."""
    if max_model_len is None or call.max_tokens is None or call.work is not None:
        return call
    room = max_model_len - call.num_prompt
    return call if call.max_tokens <= room else replace(call, max_tokens=room)


def cut_runs(runs: tuple[Run, ...], num_prompt: int) -> tuple[Run, ...]:
    """The runs of the first num_prompt tokens."""
    kept = []
    for key, length in runs:
        if num_prompt <= 0:
            break
        kept.append((key, min(length, num_prompt)))
        num_prompt -= length
    return tuple(kept)
