"""`serve bench ablation`: turns options into variants, and their figures into tables and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import uvloop

from bench.ablation import report
from bench.ablation.parts import serial_core
from bench.ablation.pools import OnDevice, measure_pools
from bench.ablation.run import AblationPlan, AblationResult, measure
from bench.ablation.variants import Variant, all_variants, chosen
from bench.common import tables
from bench.common.checkpoints import model_directory
from bench.common.plot_style import require_matplotlib
from bench.load.workload.work import Work
from bench.offline.requests import fixed_requests
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.precision import choose_backend, resolve_precision
from serve.machine import available_memory
from serve.models import read_spec

_QUICK_REQUESTS, _QUICK_ROUNDS = 32, 2
_ROOM = 4  # max_tokens of a request over the longest answer, if lengths are known


def ablation(
    model: str | None = None,
    *,
    dataset: str | None = None,
    requests: int | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    rounds: int | None = None,
    max_num_seqs: int = 64,
    qps: float | None = None,
    at_rate: bool = True,
    kv_cache_bytes: int | None = None,
    variants: list[str] | None = None,
    dtype: str = "auto",
    compute_threads: int | None = None,
    seed: int = 0,
    json_file: Path | None = None,
    png_file: Path | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Measures the same requests with each optimisation off in turn, and prints a table.

    model is a directory, "random:SHAPE", or None for the embedded model.
    dataset, requests, input_len and output_len are those of bench.offline.requests.fixed_requests.
    qps is the rate for the latencies; None takes 85 % of the highest, at_rate=False omits them.
    kv_cache_bytes is a K/V memory that is short; None takes enough for a quarter of the sequences.
    variants names those to run; None runs all.
    Returns what is written to json_file. Raises ConfigError before anything runs.
    """
    count = requests or (_QUICK_REQUESTS if quick else 200)
    num_rounds = rounds or (_QUICK_ROUNDS if quick else 8)
    if num_rounds < 1 or max_num_seqs < 1:
        raise ConfigError("rounds and max_num_seqs must be positive")
    if qps is not None and not qps > 0:
        raise ConfigError(f"qps must be a positive number, not {qps}")
    tables.check_file(json_file)
    tables.check_file(png_file, "--png")
    if png_file is not None:
        require_matplotlib()
    path = model_directory(model)
    works = fixed_requests(
        path,
        count=count,
        seed=seed,
        input_len=input_len,
        output_len=output_len,
        dataset=dataset,
    )
    works, ends = _with_room(works)
    settings = _settings(path, works, dtype, compute_threads)
    ends_early = any(not work.ignore_eos for work in works)
    selected = chosen(all_variants(_plain_dtype(path, settings), ends_early=ends_early), variants)
    plan = AblationPlan(
        path,
        list(works),
        settings,
        num_rounds,
        max_num_seqs,
        has_rate=at_rate,
        keeps_engines=_have_room(path, len(selected)),
        qps=qps,
        kv_cache_bytes=kv_cache_bytes,
        ends=ends,
    )
    head = tables.Head.now(f"ablation, {EngineConfig.from_settings(path).model_name}")
    measured, device = _measure(plan, selected)
    rows = report.rows_of(selected, measured)
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    report.show(rows, measured, max_num_seqs, console)
    if device is not None:
        report.show_device(device, console)
    result = {
        "qps": measured.qps,
        "short_bytes": measured.short_bytes,
        "kv_bytes_per_token": measured.kv_bytes_per_token,
        "tokens_per_request": measured.tokens_per_request,
        "requests": len(works),
        "variants": [asdict(row) for row in rows],
        "own_device": None if device is None else device._asdict(),
    }
    tables.write(json_file, head, result)
    if png_file is not None:
        report.draw(png_file, rows, str(head))
    return result


def _measure(
    plan: AblationPlan, variants: Sequence[Variant]
) -> tuple[AblationResult, OnDevice | None]:
    """Returns the rounds of all variants and, if one of them has no pools, the gain of the pools
    beside a scripted device. Shows the progress."""
    has_pools = any(variant.parts.core is serial_core for variant in variants)
    with tables.progress() as bar:
        total = 1 + len(variants) * plan.num_turns + plan.rounds
        task = bar.add_task("loading", total=total)

        def advance(name: str) -> None:
            bar.update(task, description=name, advance=1)

        measured = uvloop.run(measure(plan, variants, advance))
        device = uvloop.run(measure_pools(plan.rounds, advance)) if has_pools else None
    return measured, device


def _with_room(works: list[Work]) -> tuple[list[Work], dict[tuple[int, ...], int]]:
    """Sets max_tokens of answers with fixed lengths to _ROOM times the longest one, as clients do
    that do not know the lengths. Returns the requests, and the lengths of their answers by prompt;
    no lengths if the model ends an answer or prompts repeat."""
    ends = {
        tuple(work.token_ids): work.max_tokens
        for work in works
        if work.ignore_eos and work.token_ids is not None and work.max_tokens is not None
    }
    if len(ends) < len(works):
        return works, {}
    limit = _ROOM * max(ends.values())
    return [replace(work, max_tokens=limit, ignore_eos=False) for work in works], ends


def _have_room(model: str | None, count: int) -> bool:
    """Returns whether `count` engines of the model fit into memory together."""
    folder = EngineConfig.from_settings(model).model_path
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return 2 * count * size < available_memory()


def _settings(
    model: str | None, works: Sequence[Work], dtype: str, compute_threads: int | None
) -> dict[str, Any]:
    """Returns the engine's settings. If all lengths are known, the context is that of the longest
    request, so that the short memory can be small."""
    settings: dict[str, Any] = {"dtype": dtype, "compute_threads": compute_threads}
    if all(work.token_ids is not None and work.max_tokens is not None for work in works):
        longest = max(len(work.token_ids or ()) + (work.max_tokens or 0) for work in works)
        spec = read_spec(EngineConfig.from_settings(model).model_path)
        settings["max_model_len"] = min(longest, spec.max_model_len)
    return settings


def _plain_dtype(model: str | None, settings: dict[str, Any]) -> str | None:
    """Returns the type that replaces int8: bfloat16, or float32 if the machine has no bf16 product;
    None if the model does not run in int8."""
    config = EngineConfig.from_settings(model, **settings)
    spec = read_spec(config.model_path)
    precision = resolve_precision(config, spec)
    if not precision.is_int8 or precision.kv != "int8":
        return None
    has_bf16 = choose_backend(config, spec) == "cuda" or tables.has_bf16_product()
    return "bfloat16" if has_bf16 else "float32"
