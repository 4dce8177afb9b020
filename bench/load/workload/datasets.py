"""Data sets: turns `name` or `name:FILE` into a list of calls in the order of their times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.load.workload.mixed import Messages, mixed_requests, num_mixed
from bench.load.workload.published import PUBLISHED, Marginal, published_calls
from bench.load.workload.text_files import jsonl_calls, sharegpt_calls
from bench.load.workload.traces import Part, read_trace
from bench.load.workload.work import Call, Run, Work, fit_context
from serve.errors import ConfigError

DEFAULT_OUTPUT_LEN = 128
MAX_LENGTH = 10_000_000
TRACES = ("mooncake", "azure", "burstgpt")
FILES = ("sharegpt", "jsonl", *TRACES)
NAMES = ("mixed", "random", "prefix", *PUBLISHED)
TIMED = (*TRACES, "jsonl")
TAKE_INPUT_LEN = ("random", "prefix")
TAKE_OUTPUT_LEN = ("mixed", "random", "prefix", "sharegpt", "jsonl")


@dataclass(frozen=True, slots=True)
class DatasetSettings:
    """The data set to read, and how to read it.

    name is one of NAMES, or one of FILES as `name:FILE`. input_len and output_len are `N`, `A:B`
    (uniform, both included) or `lognormal:MEAN:MEDIAN`; in data set prefix they apply to each turn.
    Requests longer than max_model_len are cut or left out. start_s and end_s select a part of a
    trace, in seconds after its first row. block_size is the number of tokens of a Mooncake hash id.
    num_groups, prefix_len and num_turns belong to data set prefix. With as_text, words replace
    token ids, for servers that take none. ignore_eos of None means True for made-up prompts and the
    data set's value for texts. count_tokens counts the tokens of a text; None estimates one per 4
    characters or made-up word.
    """

    name: str = "mixed"
    input_len: str | None = None
    output_len: str | None = None
    max_model_len: int | None = None
    start_s: float = 0.0
    end_s: float = math.inf
    block_size: int = 512
    num_groups: int = 8
    prefix_len: int = 512
    num_turns: int = 4
    as_text: bool = False
    ignore_eos: bool | None = None
    count_tokens: Callable[[str], int] | None = None


def split_name(name: str) -> tuple[str, Path | None]:
    kind, separator, file = name.partition(":")
    if kind in FILES and file:
        return kind, Path(file)
    if kind in NAMES and not separator:
        return kind, None
    known = ", ".join((*NAMES, *(f"{kind}:FILE" for kind in FILES)))
    raise ConfigError(f"dataset must be one of {known}, not {name!r}")


def check(settings: DatasetSettings) -> None:
    """Raises ConfigError for settings that are wrong whatever the file contains."""
    kind, _ = split_name(settings.name)
    if settings.input_len is not None and kind not in TAKE_INPUT_LEN:
        raise ConfigError(f"input_len goes with dataset {' or '.join(TAKE_INPUT_LEN)}, not {kind}")
    if settings.output_len is not None and kind not in TAKE_OUTPUT_LEN:
        raise ConfigError(f"output_len does not go with dataset {kind}, which has its own lengths")
    if kind == "random" and settings.input_len is None:
        raise ConfigError("dataset random needs input_len")
    for name, least in (("block_size", 1), ("num_groups", 1), ("prefix_len", 0), ("num_turns", 1)):
        if getattr(settings, name) < least:
            raise ConfigError(f"{name} must be at least {least}, not {getattr(settings, name)}")
    if settings.max_model_len is not None and settings.max_model_len < 2:
        raise ConfigError(f"max_model_len must be at least 2, not {settings.max_model_len}")
    if not 0 <= settings.start_s < settings.end_s:
        raise ConfigError("trace_start and trace_end must be 0 <= trace_start < trace_end")
    for text in (settings.input_len, settings.output_len):
        if text is not None:
            parse_lengths(text)


def load_calls(
    settings: DatasetSettings, count: int | None, seed: int, notes: list[str]
) -> list[Call]:
    """Returns at most count calls, fewer if the data set has no more; None returns all of a file.

    Notes for the reader of the results are appended to notes. Raises ConfigError."""
    check(settings)
    kind, path = split_name(settings.name)
    if path is not None:
        calls = _from_file(kind, path, settings, count, seed, notes)
    else:
        if count is None:
            raise ConfigError(f"dataset {kind} has no end, so that requests must be given")
        calls = _generated(kind, settings, count, seed)
        if kind in PUBLISHED:
            notes.append(f"{kind}: requests made up with the published lengths (docs/workloads.md)")
        if kind == "mixed" and count > num_mixed():
            notes.append(f"mixed has {num_mixed():,} different requests, which are repeated")
    calls = fit_context(calls, settings.max_model_len, notes)
    if not calls:
        raise ConfigError(f"dataset {settings.name} has no request that can be sent")
    if count is not None and len(calls) < count:
        notes.append(f"dataset {settings.name} has {len(calls)} requests, not {count}")
    return calls


def _from_file(
    kind: str,
    path: Path,
    settings: DatasetSettings,
    count: int | None,
    seed: int,
    notes: list[str],
) -> list[Call]:
    part = Part(count, settings.start_s, settings.end_s)
    if kind in TRACES:
        return read_trace(kind, path, part, notes, block_size=settings.block_size)
    output_len = None
    if settings.output_len is not None:
        output_len = fixed_length("output_len", settings.output_len)
    count_tokens = settings.count_tokens or four_characters
    if settings.count_tokens is None:
        notes.append("the tokens of texts are estimated as one per 4 characters")
    if kind == "sharegpt":
        return sharegpt_calls(path, count, seed, count_tokens, output_len, notes)
    return jsonl_calls(path, part, count_tokens, output_len)


def _generated(kind: str, settings: DatasetSettings, count: int, seed: int) -> list[Call]:
    if kind == "mixed":
        return conversation_calls(settings, mixed_requests(seed, count))
    if kind == "prefix":
        return _prefix(settings, count, seed)
    if kind == "random":
        assert settings.input_len is not None
        inputs = draw_lengths(settings.input_len, count, f"input-{seed}")
        output_len = settings.output_len or str(DEFAULT_OUTPUT_LEN)
        outputs = draw_lengths(output_len, count, f"output-{seed}")
        return [Call(prompt, output) for prompt, output in zip(inputs, outputs, strict=True)]
    return published_calls(PUBLISHED[kind], count, seed)


def conversation_calls(settings: DatasetSettings, conversations: Sequence[Messages]) -> list[Call]:
    """Returns calls of conversations, whose answers the model ends; output_len only bounds them."""
    limit = None
    if settings.output_len is not None:
        limit = fixed_length("output_len", settings.output_len)
    count_tokens = settings.count_tokens or four_characters
    calls = []
    for messages in conversations:
        size = sum(count_tokens(message["content"]) for message in messages)
        work = Work(messages=messages, max_tokens=limit)
        calls.append(Call(size, None, limit, work=work))
    return calls


def _prefix(settings: DatasetSettings, count: int, seed: int) -> list[Call]:
    """Returns the turns of sessions with num_turns each. Sessions of one group share a prefix.

    The turns of all sessions are mixed at random; those of one session keep their order. A turn's
    prompt contains all earlier turns, with made-up answers, as in an open loop the real answers
    may not exist yet."""
    num_sessions = -(-count // settings.num_turns)
    rng = random.Random(f"sessions-{seed}")
    order = [i for i in range(num_sessions) for _ in range(settings.num_turns)]
    rng.shuffle(order)
    inputs = draw_lengths(settings.input_len or "64", len(order), f"input-{seed}")
    output_len = settings.output_len or str(DEFAULT_OUTPUT_LEN)
    outputs = draw_lengths(output_len, len(order), f"output-{seed}")
    histories: list[list[Run]] = [
        [(session % settings.num_groups, settings.prefix_len)] if settings.prefix_len else []
        for session in range(num_sessions)
    ]
    calls = []
    fresh = settings.num_groups
    for session, num_input, num_output in zip(order, inputs, outputs, strict=True):
        runs = histories[session]
        runs.append((fresh, num_input))
        num_prompt = sum(length for _, length in runs)
        group, client = f"session-{session}", f"group-{session % settings.num_groups}"
        calls.append(Call(num_prompt, num_output, client=client, group=group, runs=tuple(runs)))
        runs.append((fresh + 1, num_output))
        fresh += 2
    return calls[:count]


def four_characters(text: str) -> int:
    """Returns a rough number of tokens: one per 4 characters."""
    return max(1, -(-len(text) // 4))


def fixed_length(option: str, text: str) -> int:
    """Returns a length that must be one number. Raises ConfigError that names the option."""
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{option} must be one number for this data set, not {text!r}")
    parse_lengths(text)
    return int(text)


def parse_lengths(text: str) -> tuple[int, int] | Marginal:
    """Returns the lengths of `N`, `A:B` or `lognormal:MEAN:MEDIAN`. Raises ConfigError."""
    pieces = text.split(":")
    try:
        if pieces[0] == "lognormal":
            _, mean, median = pieces
            if not 1 <= float(median) <= float(mean) <= MAX_LENGTH:
                raise ValueError
            return Marginal.lognormal(float(mean), float(median))
        low, high = int(pieces[0]), int(pieces[-1])
    except ValueError:
        low, high = 0, 0
    if len(pieces) > 2 or not 1 <= low <= high <= MAX_LENGTH:
        raise ConfigError(
            f"a length must be N, A:B or lognormal:MEAN:MEDIAN with 1 <= A <= B and"
            f" 1 <= MEDIAN <= MEAN, not {text!r}"
        )
    return low, high


def draw_lengths(text: str, count: int, name: str) -> list[int]:
    parsed = parse_lengths(text)
    rng = np.random.default_rng(list(name.encode()))
    if isinstance(parsed, Marginal):
        lengths: list[int] = parsed.lengths(rng.standard_normal(count)).tolist()
    else:
        lengths = rng.integers(parsed[0], parsed[1], count, endpoint=True).tolist()
    return lengths
