"""Makes prompts for calls that have only lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from bench.load.workload.work import Call, Work
from serve.errors import ConfigError

MAX_TOKENS = 200_000_000  # of a schedule; each takes 8 bytes
# Frequent words, each of which is one token (with the space before it) in most vocabularies.
FREQUENT = """
the of and to in is it that for was on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words called just where most know get through back much before go good new write our used me
man too any day same right look think also around another came come work three word must because
does part even place well such here take why things help put years different away again off went
old number great tell men say small every found still between name should home big give air line
set own under read last never us left end along while might next sound below saw something thought
both few those always
"""
WORDS = FREQUENT.split()
T = TypeVar("T", int, str)


def make_works(
    calls: Iterable[Call],
    seed: int,
    tokens: Sequence[int],
    *,
    words_per_token: float | None = None,
    ignore_eos: bool | None = None,
) -> list[Work]:
    """Makes a work of each call. A call with a text keeps it; any other gets random tokens out of
    `tokens`, or random words if words_per_token is given. Equal runs get equal tokens, which depend
    on the seed. ignore_eos of None means True for made-up prompts and the data set's value for
    texts. Raises ConfigError for more than MAX_TOKENS."""
    calls = list(calls)
    total = sum(call.num_prompt for call in calls if call.work is None)
    if total > MAX_TOKENS:
        raise ConfigError(
            f"{len(calls)} requests have {total} prompt tokens in all; at most {MAX_TOKENS} are"
            " possible, so take fewer requests"
        )
    works = []
    for number, call in enumerate(calls):
        if call.work is None:
            prompt = None if words_per_token is None else _text(call, number, seed, words_per_token)
            token_ids = _content(call, number, seed, tokens) if prompt is None else None
            works.append(_work(call, prompt, token_ids, ignore_eos is not False))
        elif ignore_eos is None:
            works.append(call.work)
        else:
            works.append(replace(call.work, ignore_eos=ignore_eos))
    return works


def _work(call: Call, prompt: str | None, token_ids: list[int] | None, ignore_eos: bool) -> Work:
    limits = [n for n in (call.num_output, call.max_tokens) if n is not None]
    return Work(
        prompt=prompt,
        token_ids=token_ids,
        max_tokens=min(limits) if limits else None,
        ignore_eos=ignore_eos,
        client=call.client,
        group=call.group,
    )


def _content(call: Call, number: int, seed: int, vocabulary: Sequence[T]) -> list[T]:
    content: list[T] = []
    for key, length in call.runs:
        content += random_run(f"run-{seed}-{key}", length, vocabulary)
    if rest := call.num_prompt - len(content):
        content += random_run(f"own-{seed}-{number}", rest, vocabulary)
    return content


def _text(call: Call, number: int, seed: int, words_per_token: float) -> str:
    """Returns random words. Each run has its own words, so that equal runs are equal texts."""
    runs = tuple((key, round(length * words_per_token)) for key, length in call.runs)
    in_runs = sum(length for _, length in runs)
    num_words = max(1, in_runs, round(call.num_prompt * words_per_token))
    return " ".join(_content(replace(call, num_prompt=num_words, runs=runs), number, seed, WORDS))


def random_run(name: str, length: int, vocabulary: Sequence[T]) -> list[T]:
    """Returns `length` random items of the vocabulary. Results of one name begin equally."""
    rng = np.random.default_rng(list(name.encode()))
    picks = rng.integers(0, len(vocabulary), length).tolist()
    pick: Callable[[int], T] = vocabulary.__getitem__
    return list(map(pick, picks))
