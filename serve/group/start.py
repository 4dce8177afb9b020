"""Starts a group: workers, weights, one accounting, and the runner of the engine's rank."""

from __future__ import annotations

import dataclasses
import functools
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from serve.config import EngineConfig
from serve.errors import ConfigError, MergestepError
from serve.group.grid import Grid
from serve.group.group import Group, GroupLostError
from serve.group.launch import LocalWorkers, cpus_of_ranks, threads_of_a_rank
from serve.group.membership import Membership, read_group_key, read_membership
from serve.group.messages import Kind
from serve.group.rank import Rank, shard_of
from serve.group.recovery import GroupRecovery
from serve.group.remote_workers import RemoteWorkers
from serve.group.runners import PipelineRunner, TensorRunner
from serve.group.sizes import stage_window_bytes
from serve.group.stages import layer_stages
from serve.group.worker_link import WorkerFailed, WorkerLink, end_workers
from serve.loading.footprint import check_weights_fit
from serve.loading.model_source import ModelSource, read_source
from serve.loading.rank_memory import make_accounting
from serve.loading.runtime import Runtime, log_sizes
from serve.machine import KV_SHARE_OF_FREE_MEMORY, available_memory, local_kv_bytes
from serve.models import ModelSpec
from serve.models.progress import LoadProgress
from serve.models.shard import check_heads
from transport.base import TransportError

logger = logging.getLogger(__name__)

AnyWorkers = LocalWorkers | RemoteWorkers
_LOAD_S = 3600.0  # a worker reports each layer; a dead one is seen at once


@dataclass(slots=True)
class GroupRuntime:
    """A loaded group. make_recovery: as EngineCore takes it."""

    runtime: Runtime
    make_recovery: Callable[..., GroupRecovery]


def start_group(config: EngineConfig, progress: LoadProgress) -> GroupRuntime:
    """Starts the workers of a config with more than one rank, or waits for those that others start,
    and loads the model on all of them.

    Call it in the compute thread. Raises ConfigError, ModelLoadError and MergestepError.
    """
    _check(config)
    size, member = config.num_ranks, read_membership(config)
    size_here = size if member is None else member.local_size
    config = replace(config, compute_threads=threads_of_a_rank(config, size_here))
    source = read_source(config)
    grid = make_grid(source.config, source.spec)
    if member is None:  # all ranks share this machine's memory
        check_weights_fit(source.config, source.spec, source.precision)
    workers = LocalWorkers() if member is None else _remote_workers(config, member)
    links: list[WorkerLink] = []
    try:
        loader = WorkerLoader(workers, source, grid)
        links = loader.spawn(range(1, size), progress.check)
        own = Rank(source, grid, 0, replace(progress, check=_both(progress.check, links)))
        loader.await_ready(links, progress.check)
    except BaseException as error:
        end_workers(links)
        workers.close()
        if isinstance(error, (TransportError, WorkerFailed)):
            raise MergestepError(f"starting the group failed: {error}") from error
        raise
    group = Group(own, grid, links, workers.key)
    try:
        return _form(source, grid, group, workers, loader)
    except BaseException as error:
        group.close()
        workers.close()
        if isinstance(error, GroupLostError):
            raise MergestepError(f"starting the group failed: {error}") from error
        raise


def _remote_workers(config: EngineConfig, member: Membership) -> RemoteWorkers:
    if member.rank:
        raise ConfigError(f"this process is rank {member.rank}, which `serve run` alone runs")
    return RemoteWorkers(member, read_group_key(config, member))


def _form(
    source: ModelSource, grid: Grid, group: Group, workers: AnyWorkers, loader: WorkerLoader
) -> GroupRuntime:
    config, spec, precision, *_ = source
    free = _kv_bytes_of_a_rank(config, list(group.links.values()))
    shards = [replace(shard_of(grid, rank), exchange=None) for rank in range(grid.size)]
    kv, recorder, geometry = make_accounting(config, spec, precision, shards, free)
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


def _kv_bytes_of_a_rank(config: EngineConfig, links: Sequence[WorkerLink]) -> int:
    """Returns what each rank may take for K/V: the least of all hosts, whose ranks share it."""
    free_of: dict[str, list[int]] = {socket.gethostname(): [available_memory()]}
    for link in links:
        free_of.setdefault(link.host, []).append(link.free_bytes)
    if len(free_of) == 1:
        return (config.kv_cache_bytes or local_kv_bytes()) // (len(links) + 1)
    return min(
        (config.kv_cache_bytes or int(min(free) * KV_SHARE_OF_FREE_MEMORY)) // len(free)
        for free in free_of.values()
    )


class WorkerLoader:
    """Starts workers and has them load their weights."""

    def __init__(self, workers: AnyWorkers, source: ModelSource, grid: Grid) -> None:
        self._workers = workers
        self._source = source
        self._grid = grid
        self._is_remote = isinstance(workers, RemoteWorkers)
        # ranks that others have started know their cores themselves
        self._cpus = [[]] * grid.size if self._is_remote else cpus_of_ranks(grid.size)

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
        try:
            for link in links:
                link.post_json(Kind.LOAD, 0, self._load_content(link.rank))
        except BaseException:
            for link in links:
                link.close()
            raise
        return links

    def _load_content(self, rank: int) -> dict[str, object]:
        config, spec, urls = self._source.config, self._source.spec, self._workers
        has_siblings = self._is_remote or config.group_exchange == "connections"
        return {
            "config": _as_json(config),
            "grid": self._grid.to_json(),
            "rank": rank,
            "stage_url": urls.stage_url(rank),
            "sibling_url": urls.stage_url(rank) if has_siblings else "",
            "cpus": self._cpus[rank],
            "window_bytes": stage_window_bytes(config, spec, self._grid.num_stages),
        }

    def await_ready(self, links: Sequence[WorkerLink], check: Callable[[], object]) -> None:
        for link in links:
            ready = link.await_json(Kind.READY, _LOAD_S, check)
            link.url, link.host = str(ready.get("url", "")), str(ready.get("host", ""))
            link.sibling_url = str(ready.get("sibling_url", ""))
            link.free_bytes = int(ready.get("free_bytes", 0))


def make_grid(config: EngineConfig, spec: ModelSpec) -> Grid:
    """Returns the ranks of a model. ConfigError names the setting that does not fit."""
    tensor, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    for layer in set(spec.layers):
        check_heads(layer.attention, tensor)
    return Grid(tensor, layer_stages(spec, num_stages))


def _check(config: EngineConfig) -> None:
    """Refuses settings that a group does not have."""
    for name in ("memory_nodes", "kvp", "borrow", "lend", "kv_cache_dir", "converter"):
        if getattr(config, name):
            raise ConfigError(f"{name} needs a model on one rank, not {config.num_ranks}")
    if config.backend == "cuda":
        raise ConfigError("tensor_parallel_size and pipeline_parallel_size need the cpu back end")


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
