"""`serve bench throughput`: sends a fixed set of requests at once to an engine in this process.

The ceilings of the machine are read before and after every repeat. The share of the bound is the
least time that the steps could have taken over the time of the run. A peer answers the same prompts
with the same numbers of tokens, in turn with our engine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from bench.common import tables
from bench.common.ceilings import Ceiling, probe_for
from bench.common.checkpoints import model_directory
from bench.common.model_cost import ModelCost
from bench.load.workload.work import Work
from bench.offline.requests import fixed_requests
from bench.offline.saturated import RecordingTarget, Saturated, saturate
from bench.offline.transformers_peer import MODES, Load, TransformersPeer, require_transformers
from serve import Engine
from serve.errors import ConfigError

_WARM_UP = 16


@dataclass(slots=True)
class ThroughputRuns:
    """The repeats: our runs with their shares of the bound and ceilings, and the seconds of a peer
    by mode."""

    runs: list[Saturated] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    ceilings: list[Ceiling] = field(default_factory=list)
    peer_s: dict[str, list[float]] = field(default_factory=dict)

    def figures(self) -> dict[str, list[float]]:
        """Returns the figures of each repeat by name."""
        return {
            "requests/s": [run.requests_per_s for run in self.runs],
            "output tokens/s": [run.tokens_per_s for run in self.runs],
            "prompt tokens/s": [run.prompt_tokens / run.seconds for run in self.runs],
            "seconds": [run.seconds for run in self.runs],
            "steps": [float(len(run.steps)) for run in self.runs],
            "rows a step": [
                statistics.fmean(step.work.num_rows for step in run.steps) for run in self.runs
            ],
            "sequences at once": [run.running_mean for run in self.runs],
            "preemptions": [float(run.num_preemptions) for run in self.runs],
        }


def throughput(
    model: str | None = None,
    *,
    dataset: str | None = None,
    requests: int | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
    repeats: int | None = None,
    max_num_seqs: int = 256,
    max_model_len: int | None = None,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    compute_threads: int | None = None,
    backend: str = "auto",
    peer: str | None = None,
    seed: int = 0,
    json_file: Path | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Runs all requests at once, several times; prints rates, steps and the share of the bound.

    model is a directory, "random:SHAPE", or None for the embedded model. dataset, requests (by
    default 128), input_len and output_len are those of bench.offline.requests.fixed_requests. peer
    is "transformers" or None. Returns what is written to json_file. Raises ConfigError before
    anything runs.
    """
    tables.check_file(json_file)
    num_repeats = repeats or (1 if quick else 3)
    _check(num_repeats, peer)
    path = model_directory(model)
    works = fixed_requests(
        path,
        count=requests or (16 if quick else 128),
        seed=seed,
        input_len=input_len,
        output_len=output_len,
        dataset=dataset,
    )
    engine = Engine(
        path,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        compute_threads=compute_threads,
        backend=backend,
        prefix_cache=False,
        speculation="off",  # random weights repeat themselves more than a model does
        inter_token_factor=math.inf,  # no stream is read token by token
        seed=0,
    )
    head = tables.Head.now(f"throughput, {engine.model_name}")
    runs = _with_progress(engine, works, num_repeats, peer is not None)
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    result = _result(engine, runs)
    _show(runs, result, console)
    tables.write(json_file, head, result)
    return result


def _check(repeats: int, peer: str | None) -> None:
    if repeats < 1:
        raise ConfigError(f"repeats must be a positive number, not {repeats}")
    if peer not in (None, "transformers"):
        raise ConfigError(f"peer must be transformers, not {peer!r}")
    if peer is not None:
        require_transformers()


def _with_progress(
    engine: Engine, works: Sequence[Work], repeats: int, has_peer: bool
) -> ThroughputRuns:
    """Runs the repeats and shows how many are done."""
    with tables.progress() as bar:
        task = bar.add_task("loading", total=repeats * (1 + len(MODES) if has_peer else 1))

        def advance(what: str) -> None:
            bar.update(task, description=what, advance=1)

        return uvloop.run(_measure(engine, works, repeats, has_peer, advance))


async def _measure(
    engine: Engine,
    works: Sequence[Work],
    repeats: int,
    has_peer: bool,
    advance: Callable[[str], None],
) -> ThroughputRuns:
    measured = ThroughputRuns()
    with ExitStack() as stack:
        async with engine:
            target = RecordingTarget(engine)
            await saturate(target, works[:_WARM_UP])
            probe = probe_for(engine.config, engine.spec)
            cost = ModelCost.of(engine.config, engine.spec, engine.stats().kv_bytes_per_token)
            peer: TransformersPeer | None = None
            if has_peer:
                dtype = "float32" if engine.config.dtype == "float32" else "bfloat16"
                peer = stack.enter_context(TransformersPeer(engine.config.model_path, dtype))
            for _ in range(repeats):
                advance("requests")
                before = probe()
                run = await saturate(target, works)
                measured.runs.append(run)
                measured.ceilings.append(before.mean(probe()))
                measured.shares.append(cost.bound_s(run.steps, measured.ceilings[-1]) / run.seconds)
                for mode in MODES if peer is not None else ():
                    assert peer is not None
                    advance(f"transformers, {mode}")
                    load = Load(run.prompts, [len(tokens) for tokens in run.tokens])
                    measured.peer_s.setdefault(mode, []).append(peer.run(mode, load))
    return measured


def _result(engine: Engine, measured: ThroughputRuns) -> dict[str, Any]:
    run = measured.runs[0]
    result: dict[str, Any] = {
        "model": engine.model_name,
        "requests": run.num_requests,
        "prompt_tokens": run.prompt_tokens,
        "output_tokens": run.output_tokens,
        **measured.figures(),
        "share_of_bound": measured.shares,
        "ceilings": [ceiling._asdict() for ceiling in measured.ceilings],
    }
    if measured.peer_s:
        result["peer_seconds"] = measured.peer_s
        best = min(statistics.median(seconds) for seconds in measured.peer_s.values())
        result["over_peer"] = best / statistics.median(result["seconds"])
    return result


def _show(measured: ThroughputRuns, result: dict[str, Any], console: Console) -> None:
    title = (
        f"{result['requests']} requests at once: {result['prompt_tokens']:,} prompt and"
        f" {result['output_tokens']:,} output tokens; medians and ranges of {len(measured.runs)}"
    )
    table = Table("", title.partition(":")[0], title=title, title_justify="left")
    for name, values in measured.figures().items():
        table.add_row(name, tables.spread(values))
    shares = [100 * share for share in measured.shares]
    if any(shares):
        table.add_row("share of the bound", tables.spread(shares, "{:.0f}".format) + " %")
    console.print(table)
    console.print(f"ceilings: {measured.ceilings[0]}", highlight=False)
    for mode, seconds in measured.peer_s.items():
        rate = result["output_tokens"] / statistics.median(seconds)
        console.print(
            f"transformers, {mode}: {tables.spread(seconds)} s, {rate:.1f} output tokens/s"
        )
    if measured.peer_s:
        console.print(f"our speed over its faster mode: {result['over_peer']:.2f}x")
