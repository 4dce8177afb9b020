"""Runs exercises under K/V policies, on the engine or on the reference in torch."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch

from bench.quality.network import Network
from bench.quality.policies import POLICIES
from bench.quality.reference import Reference
from bench.quality.tasks import ACCURACIES, MAX_FOLLOWING, TEXT, Exercise
from bench.quality.vocabulary import text_of
from memory.attention.tiled import is_selectable
from memory.policies.setting import parse_kv_policy
from quant.kv import TILE_TOKENS, bounds_bytes
from serve.config import EngineSettings
from serve.engine.llm import LLM
from serve.errors import ConfigError
from serve.models import read_spec
from serve.sampling_params import SamplingParams
from serve.structured_output import StructuredOutput

BUDGETS = ("100%", "50%", "25%", "12%", "6%")
FULL = "full"
SEED = 0  # of keyformer's noise
Report = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """One exercise under one policy. right, logprobs: of the tokens that follow the prompt.

    held, read: K/V tokens of a layer and head, on average, after the last token and by each
    decoded token, as shares of the sequence (on an engine, of the layer that holds the most; what
    a policy that drops reads is taken to be what it holds; what selects reads the bounds of all
    tiles as well). step_s: of a decoded token, NaN if not measured. kv_bytes: of the whole
    sequence.
    """

    right: list[bool]
    logprobs: list[float]
    held: float
    read: float
    kv_bytes: int
    step_s: float = math.nan


@dataclass(frozen=True)
class Row:
    """A policy's figures. accuracy: by task, of questions. held, read: shares of all K/V of a
    text, which has kv_bytes."""

    policy: str
    accuracy: dict[str, float]
    perplexity: float
    held: float
    read: float
    kv_bytes: float
    step_ms: float


def all_policies(chosen: Sequence[str]) -> list[str]:
    """Returns the policies with their budgets. chosen: NAME:budget=AMOUNT, NAME for each of
    BUDGETS, or "all". Raises ConfigError."""
    names = [name for name in POLICIES if name != FULL]
    found = [FULL]
    for text in chosen:
        name, has_budget, _ = text.partition(":")
        if text != "all" and name not in names:
            raise ConfigError(f"--kv-policy must be all or one of {', '.join(names)}, not {text!r}")
        if has_budget:
            _check(text)
            found.append(text)
        else:
            of = names if text == "all" else [name]
            found += [f"{one}:budget={budget}" for one in of for budget in BUDGETS]
    return list(dict.fromkeys(found))


def _check(policy: str) -> None:
    try:
        parse_kv_policy(policy)
    except ValueError as error:
        raise ConfigError(f"--kv-policy {error}") from None


def by_reference(
    model: Path, policies: Sequence[str], exercises: Sequence[Exercise], report: Report
) -> dict[str, list[Outcome]]:
    """Runs the exercises in torch, in float32."""
    has_noise = any(POLICIES[policy.partition(":")[0]].uses_noise for policy in policies)
    reference = Reference(Network.load(model), room=MAX_FOLLOWING, with_noise=has_noise, seed=SEED)
    shape = reference.network.shape
    token_bytes = 2 * 4 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    found: dict[str, list[Outcome]] = {policy: [] for policy in policies}
    for number, exercise in enumerate(exercises, 1):
        report(f"{exercise.task}, {number} of {len(exercises)}")
        prompt = reference.read(exercise.prompt)
        for policy in policies:
            going = reference.start(prompt, policy, len(exercise.following))
            right, logprobs = [], []
            for index, token in enumerate(exercise.following, 1):
                right.append(int(going.logits.argmax()) == token)
                logprobs.append(float(torch.log_softmax(going.logits, -1)[token]))
                if index < len(exercise.following):  # nothing follows the last one
                    going.step(token)
            length = len(exercise.prompt) + len(exercise.following)
            held, read = going.held / going.layers[0].length, going.read / max(1, going.all)
            size = length * token_bytes
            found[policy].append(Outcome(right, logprobs, held, read, size))
    return found


def by_engine(
    model: Path,
    policies: Sequence[str],
    exercises: Sequence[Exercise],
    report: Report,
    **settings: Unpack[EngineSettings],
) -> dict[str, list[Outcome]]:
    """Runs the exercises on an engine for each policy. settings: others of the engine."""
    found = {}
    for policy in policies:
        report(policy)
        settings["kv_policy"] = "off" if policy == FULL else policy
        with LLM(model, **settings) as llm:
            bounds = _bounds_share(model, llm)
            found[policy] = [_decode(llm, exercise, bounds) for exercise in exercises]
    return found


def _bounds_share(model: Path, llm: LLM) -> float:
    """Returns which share of the K/V memory is bounds, from which tiles are selected."""
    if llm._loaded.selection is None:
        return 0.0
    layers = filter(is_selectable, read_spec(model).attention_layers)
    size = sum(bounds_bytes(layer.num_kv_heads, layer.head_dim) for layer in layers)
    return size / TILE_TOKENS / llm.stats().kv_bytes_per_token


def read_share(num_read: int, num_held: int, bounds: float) -> float:
    """Returns which share of its K/V a row reads that selects num_read of num_held tiles. bounds:
    the share that is bounds: a row that reads every tile needs none, others read all of them."""
    if num_read == num_held:
        return 1.0 - bounds
    return num_read / num_held * (1.0 - bounds) + bounds


def _decode(llm: LLM, exercise: Exercise, bounds: float) -> Outcome:
    """Decodes what follows a prompt: the only text that the answer may be. bounds: see
    read_share."""
    form = StructuredOutput("choice", json.dumps([text_of(exercise.following)]))
    params = SamplingParams(
        max_tokens=len(exercise.following), temperature=0.0, logprobs=1, structured=form, seed=SEED
    )
    before = _counts(llm)
    done = llm.generate([exercise.prompt], params, use_tqdm=False)[0]
    dropped, read, selected = (a - b for a, b in zip(_counts(llm), before, strict=True))
    answer = done.outputs[0]
    assert answer.token_ids == exercise.following and answer.logprobs is not None
    places = list(zip(exercise.following, answer.logprobs, strict=True))
    length = len(exercise.prompt) + len(exercise.following)
    times = done.metrics
    assert times is not None and times.finished_s is not None and times.first_token_s is not None
    held = 1 - dropped / length
    return Outcome(
        [place[token].rank == 1 for token, place in places],
        [place[token].logprob for token, place in places],
        held,
        read_share(read, selected, bounds) if selected else held,
        length * llm.stats().kv_bytes_per_token,
        (times.finished_s - times.first_token_s) / max(1, len(places) - 1),
    )


def _counts(llm: LLM) -> tuple[int, int, int]:
    """Returns the tokens dropped so far, and the tiles read by selections and those of their
    sequences."""
    dropped, selection = llm.stats().dropped_tokens, llm._loaded.selection
    if selection is None:
        return dropped, 0, 0
    return dropped, selection.num_read, selection.num_held


def rows_of(exercises: Sequence[Exercise], found: dict[str, list[Outcome]]) -> Iterator[Row]:
    """Yields the figures of each policy."""
    for policy, outcomes in found.items():
        right: dict[str, list[bool]] = {task: [] for task in ACCURACIES}
        losses = []
        for exercise, outcome in zip(exercises, outcomes, strict=True):
            if exercise.task == TEXT:
                losses += [-one for one in outcome.logprobs]
            else:
                right[exercise.task] += [
                    all(outcome.right[i] for i in places) for places in exercise.answers
                ]
        texts = [o for e, o in zip(exercises, outcomes, strict=True) if e.task == TEXT]
        yield Row(
            policy,
            {task: statistics.fmean(of) for task, of in right.items()},
            math.exp(statistics.fmean(losses)),
            statistics.fmean(o.held for o in texts),
            statistics.fmean(o.read for o in texts),
            statistics.fmean(o.kv_bytes for o in texts),
            1e3 * statistics.fmean(o.step_s for o in texts),
        )
