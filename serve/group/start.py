"""Starts a group: workers, weights, one accounting, and the runner of the engine's rank."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from serve.config import EngineConfig
from serve.errors import ConfigError, MergestepError
from serve.group.grid import Grid
from serve.group.group import Group
from serve.group.launch import LocalWorkers
from serve.group.messages import Kind
from serve.group.rank import Rank, shard_of
from serve.group.recovery import GroupRecovery
from serve.group.runners import PipelineRunner, TensorRunner
from serve.group.sizes import stage_window_bytes
from serve.group.stages import layer_stages
from serve.group.worker_link import WorkerFailed, WorkerLink
from serve.loading.footprint import check_weights_fit
from serve.loading.model_source import ModelSource, read_source
from serve.loading.rank_memory import make_accounting
from serve.loading.runtime import Runtime, log_sizes
from serve.machine import local_kv_bytes, usable_processors
from serve.models import ModelSpec
from serve.models.progress import LoadProgress
from serve.models.shard import check_heads
from transport.base import TransportError

logger = logging.getLogger(__name__)

_LOAD_S = 3600.0  # a worker reports each layer; a dead one is seen at once


@dataclass(slots=True)
class GroupRuntime:
    """A loaded group. make_recovery: as EngineCore takes it."""

    runtime: Runtime
    make_recovery: Callable[..., GroupRecovery]


def start_group(config: EngineConfig, progress: LoadProgress) -> GroupRuntime:
    """Starts the workers of a config with more than one rank, and loads the model on all of them.

    Call it in the compute thread. Raises ConfigError, ModelLoadError and MergestepError.
    """
    _check(config)
    size = config.num_ranks
    config = replace(config, compute_threads=_threads_of_a_rank(config, size))
    source = read_source(config)
    grid = make_grid(source.config, source.spec)
    check_weights_fit(source.config, source.spec, source.precision)
    workers = LocalWorkers()
    links: list[WorkerLink] = []
    try:
        loader = WorkerLoader(workers, source, grid)
        links = loader.spawn(range(1, size), progress.check)
        own = Rank(source, grid, 0, replace(progress, check=_both(progress.check, links)))
        loader.await_ready(links, progress.check)
    except BaseException as error:
        for link in links:
            link.close()
        workers.close()
        if isinstance(error, (TransportError, WorkerFailed)):
            raise MergestepError(f"starting the group failed: {error}") from error
        raise
    group = Group(own, grid, links, workers.key)
    try:
        return _form(source, grid, group, workers, loader)
    except BaseException:
        group.close()
        workers.close()
        raise


def _form(
    source: ModelSource, grid: Grid, group: Group, workers: LocalWorkers, loader: WorkerLoader
) -> GroupRuntime:
    config, spec, precision, *_ = source
    # workers share this machine's memory
    wanted = config.kv_cache_bytes or local_kv_bytes()
    shards = [replace(shard_of(grid, rank), exchange=None) for rank in range(grid.size)]
    kv, recorder, geometry = make_accounting(config, spec, precision, shards, wanted // grid.size)
    group.form(geometry)
    kind = PipelineRunner if grid.num_stages > 1 else TensorRunner
    runner = kind(group, kv, recorder, workers)
    log_sizes(config, precision, kv)
    _log_grid(source, grid)
    assert group.own.memory is not None
    runtime = Runtime(
        spec,
        precision,
        group.own.model,
        group.own.memory.attention,
        kv,
        group.own.memory,
        runner=runner,
    )
    make = functools.partial(
        GroupRecovery, group, kv, recorder, loader.start, config.group_restart_s
    )
    return GroupRuntime(runtime, make)


class WorkerLoader:
    """Starts workers and has them load their weights."""

    def __init__(self, workers: LocalWorkers, source: ModelSource, grid: Grid) -> None:
        self._workers = workers
        self._source = source
        self._grid = grid
        self._cpus = _cpus_of_ranks(grid.size)

    def start(self, ranks: Sequence[int], check: Callable[[], object] = object) -> list[WorkerLink]:
        """Starts workers and waits until they are loaded. Raises MergestepError, WorkerFailed and
        TransportError."""
        links = self.spawn(ranks, check)
        try:
            self.await_ready(links, check)
        except BaseException:
            for link in links:
                link.close()
            raise
        return links

    def spawn(self, ranks: Sequence[int], check: Callable[[], object]) -> list[WorkerLink]:
        """Starts workers, which then load their weights."""
        links = self._workers.start(ranks, check)
        config, spec = self._source.config, self._source.spec
        for link in links:
            content: dict[str, object] = {
                "config": _as_json(config),
                "grid": self._grid.to_json(),
                "rank": link.rank,
                "stage_url": self._workers.stage_url(link.rank),
                "cpus": self._cpus[link.rank],
                "window_bytes": stage_window_bytes(config, spec, self._grid.num_stages),
            }
            link.post_json(Kind.LOAD, 0, content)
        return links

    def await_ready(self, links: Sequence[WorkerLink], check: Callable[[], object]) -> None:
        for link in links:
            ready = link.await_json(Kind.READY, _LOAD_S, check)
            link.url, link.host = str(ready.get("url", "")), str(ready.get("host", ""))


def make_grid(config: EngineConfig, spec: ModelSpec) -> Grid:
    """Returns the ranks of a model. ConfigError names the setting that does not fit."""
    tensor, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    for layer in set(spec.layers):
        check_heads(layer.attention, tensor)
    return Grid(tensor, layer_stages(spec, num_stages))


def _check(config: EngineConfig) -> None:
    """Refuses settings that a group does not have."""
    for name in ("memory_nodes", "kvp", "kv_cache_dir", "converter"):
        if getattr(config, name):
            raise ConfigError(f"{name} needs a model on one rank, not {config.num_ranks}")
    if config.backend == "cuda":
        raise ConfigError("tensor_parallel_size and pipeline_parallel_size need the cpu back end")


def _threads_of_a_rank(config: EngineConfig, size: int) -> int:
    processors = min(config.compute_threads or usable_processors(), usable_processors())
    return max(1, processors // size)


def _cpus_of_ranks(size: int) -> list[list[int]]:
    """Returns the cores of each rank, so that ranks do not take turns on one; empty where there
    are fewer cores than ranks."""
    cpus = sorted(os.sched_getaffinity(0))
    count = len(cpus) // size
    return [cpus[rank * count : (rank + 1) * count] if count else [] for rank in range(size)]


def _both(check: Callable[[], object], links: Sequence[WorkerLink]) -> Callable[[], object]:
    """Returns a check that also ends the loading when a worker is gone."""

    def check_both() -> None:
        check()
        for link in links:
            if link.is_lost:
                raise MergestepError(f"rank {link.rank}: {link.state}")

    return check_both


def _as_json(config: EngineConfig) -> dict[str, object]:
    """Returns the settings as JSON; workers have no length predictor."""
    values = dataclasses.asdict(replace(config, length_predictor=None))
    values["model"] = str(config.model_path)
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in values.items()
    }


def _log_grid(source: ModelSource, grid: Grid) -> None:
    stages = ", ".join(f"{first} to {first + count - 1}" for first, count in grid.stages)
    logger.info(
        "%d ranks: %d stages (layers %s) of %d tensor ranks, %d threads each",
        grid.size,
        grid.num_stages,
        stages,
        grid.tensor,
        source.config.compute_threads,
    )
