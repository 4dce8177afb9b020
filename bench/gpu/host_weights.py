"""A part of the weights in host memory: layers through a ring, and experts that the CPU computes.

Each case is an engine with everything on the device beside one that has about half of its layers,
or of its experts, in host memory: answers, tokens a second, and the seconds of a step at which the
bytes that are copied or read by the CPU would take all of the link or of the host's memory. Of the
experts in host memory the hottest ones are on the device meanwhile, and all come to it for a long
prompt: the case fails if the device computed none of the former, or none of the latter although
the prompt has as many rows as are said to be worth it.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common.checkpoint_shapes import config_of
from bench.common.checkpoints import write_random
from bench.gpu.record import Figures, Record
from ops.cpu import native_library
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.loading.footprint import weight_bytes
from serve.loading.precision import resolve_precision
from serve.models import read_spec

if TYPE_CHECKING:
    from serve.loading.host_weights.cache import HostWeights

_PROMPTS = ([5, 6, 7, 8], [9] * 7, [11, 12])
# of log-probabilities of first tokens in int8, which the CPU rounds at other places
_LARGEST_DIFFERENCE = 0.2
Answers = list[tuple[list[int], float]]


@dataclass(frozen=True)
class _Case:
    """A model of so many layers of a shape. part: of WeightBytes, about half of which leaves.
    min_rows: the fewest rows of a step whose experts are all copied to the device; None: as
    measured, which means nothing where kernels are interpreted."""

    shape: str
    layers: int
    part: str
    settings: dict[str, Any]
    batches: tuple[int, ...] = (1, 16)
    num_tokens: int = 32
    num_rows: int = 480  # of the long prompt
    num_prompts: int = len(_PROMPTS)
    changes: dict[str, Any] = field(default_factory=dict)  # of the shape
    min_rows: int | None = None


_SETTINGS: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 512}
_SETTINGS |= {"max_num_batched_tokens": 512}
_TINY: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 16}
_TINY |= {"kv_cache_bytes": 1 << 20}
_SMALL: dict[str, Any] = {"vocab_size": 320}
CASES = {
    "ring": _Case("llama-8b", 12, "blocks", _SETTINGS),
    "experts": _Case("olmoe-1b-7b", 6, "experts", _SETTINGS),
}
DRY = {
    "ring": _Case("one-layer", 5, "blocks", _TINY, (1,), 1, 6, 1),
    "experts": _Case("tiny-mixture", 2, "experts", _TINY, (), 6, 4, 1, _SMALL, min_rows=4),
}


def run(record: Record) -> None:
    if not native_library.is_available():
        record.put("skipped", reason="the native kernels are not built")
        return
    for name, case in (DRY if record.is_dry else CASES).items():
        record.run(name, partial(_measure, case, is_exact=case.part == "blocks"))


def _measure(case: _Case, *, is_exact: bool) -> Figures:
    """Raises AssertionError if answers differ that should not."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(case.shape) | {"num_hidden_layers": case.layers} | case.changes
        write_random(Path(folder), config, case.shape, has_weights=False)
        settings: dict[str, Any] = {"backend": "cuda", "load_format": "random", "dtype": "int8"}
        settings |= {"seed": 0, "prefix_cache": False, "tune": False, **case.settings}
        bounds = EngineConfig.from_settings(folder, **settings)
        spec = read_spec(Path(folder))
        sizes = weight_bytes(bounds, spec, resolve_precision(bounds, spec, is_trial=True))
        budget = int(1.03 * sizes.total - getattr(sizes, case.part) / 2)
        whole, figures = _run(folder, case, "on_device", **settings)
        part, more = _run(folder, case, "beside", weight_memory_bytes=budget, **settings)
    figures |= more | {"weight_gib": sizes.total / 2**30, "budget_gib": budget / 2**30}
    figures["equal"] = sum(a[0] == b[0] for a, b in zip(whole, part, strict=True))
    differences = [abs(a[1] - b[1]) for a, b in zip(whole, part, strict=True)]
    figures["answers"], figures["difference"] = len(whole), max(differences)
    if is_exact:
        assert figures["equal"] == len(whole), f"{figures['equal']} answers are equal"
    assert figures["difference"] < _LARGEST_DIFFERENCE, f"{figures}"
    return figures


def _run(folder: str, case: _Case, name: str, **settings: Any) -> tuple[Answers, Figures]:
    """Returns the tokens of answers, with the log-probability of the first, and tokens a second."""
    began = time.perf_counter()
    with LLM(folder, **settings) as llm:
        figures: Figures = {f"{name}_start_s": time.perf_counter() - began}
        if "weight_memory_bytes" in settings:
            figures |= _placed(llm)
            _set_min_rows(llm, case)
        one = SamplingParams(
            max_tokens=case.num_tokens, temperature=0.0, ignore_eos=True, logprobs=0
        )
        answers: Answers = []
        long = [5 + number % 200 for number in range(case.num_rows)]
        prompts = list(map(list, _PROMPTS[: case.num_prompts]))
        for found in llm.generate([*prompts, long], one, use_tqdm=False):
            output = found.outputs[0]
            assert output.logprobs is not None
            token = output.token_ids[0]
            answers.append((list(output.token_ids), output.logprobs[0][token].logprob))
        for batch in case.batches:
            prompts = [[5 + number, 6, 7] for number in range(batch)]
            began = time.perf_counter()
            llm.generate(prompts, one, use_tqdm=False)
            seconds = time.perf_counter() - began
            figures[f"{name}_tokens_per_s_{batch}"] = batch * case.num_tokens / seconds
        began = time.perf_counter()
        llm.generate([long[::-1]], replace(one, max_tokens=1), use_tqdm=False)
        figures[f"{name}_prompt_s"] = time.perf_counter() - began
        if "weight_memory_bytes" in settings:
            figures |= _experts(llm, case)
    return answers, figures


def _set_min_rows(llm: LLM, case: _Case) -> None:
    on_device = _host_weights(llm).on_device
    if case.min_rows is not None:
        has_ring = on_device is not None and on_device.ring is not None
        assert on_device is not None and has_ring, "the device has no ring for experts"
        on_device.min_rows = case.min_rows


def _host_weights(llm: LLM) -> HostWeights:
    from serve.loading.host_weights.cache import HostWeights

    stream = llm._loaded.weight_stream
    assert isinstance(stream, HostWeights), "the weights do not fit the budget"
    return stream


def _experts(llm: LLM, case: _Case) -> Figures:
    """Returns where the experts of host memory were computed. AssertionError if the device did not
    compute those that it should."""
    stream = _host_weights(llm)
    if not stream.experts_on_cpu:
        return {}
    stats, on_device = stream.stats(), stream.on_device
    assert on_device is not None, "the device has no room for experts"
    figures: Figures = {
        "experts_on_device": stats.expert_hits,
        "experts_copied": stats.expert_late,
        "experts_on_cpu": stats.expert_misses,
        "slots": 0 if on_device.hot is None else on_device.hot.num_slots,
        "min_rows": on_device.min_rows or 0,
    }
    least = on_device.min_rows
    # with a least number of one row even the steps of one request copy all their experts
    is_split = on_device.hot is not None and least != 1
    assert not is_split or stats.expert_hits, f"{figures}"
    is_copied = least is not None and least <= case.num_rows
    assert not is_copied or stats.expert_late, f"{figures}"
    return figures


def _placed(llm: LLM) -> Figures:
    """Returns what is where, and what a step of one row takes at least by the measured speeds."""
    from serve.loading.host_weights.cache import measure_speeds
    from serve.loading.host_weights.placement import expected_step_s

    stream = _host_weights(llm)
    speeds = measure_speeds(stream.link)
    return {
        "layers_in_ring": len(stream.placement.ring_layers),
        "layers_on_cpu": len(stream.placement.on_cpu),
        "host_gib": stream.placement.host_bytes / 2**30,
        "expected_tokens_per_s_1": 1 / expected_step_s(stream.needs, stream.placement, speeds),
        "link": speeds.link,
        "host_memory": speeds.host,
    }
