"""Starts a group: workers, weights, one accounting, and the runner of the engine's rank."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memory.kv_manager import KVManager
from memory.nodes.rank_links import HeldEditRecorder
from memory.segmented_kv import SegmentedKV
from serve.config import EngineConfig
from serve.errors import ConfigError, MergestepError
from serve.group.errors import GroupLostError
from serve.group.grid import Grid
from serve.group.group import Group
from serve.group.group_store import GroupStore
from serve.group.launch import LocalWorkers, cpus_of_ranks, threads_of_a_rank
from serve.group.links.messages import Kind
from serve.group.links.worker_link import WorkerFailed, WorkerLink, end_workers
from serve.group.membership import Membership, read_group_key, read_membership
from serve.group.rank import Rank, shard_of
from serve.group.recovery import GroupRecovery
from serve.group.remote_workers import RemoteWorkers
from serve.group.room import kv_bytes_of_a_rank, weight_bytes_of_ranks
from serve.group.runners import PipelineRunner, TensorRunner
from serve.group.sizes import stage_window_bytes
from serve.group.stages import layer_stages
from serve.loading.footprint import check_weights_fit
from serve.loading.model_source import ModelSource, read_source
from serve.loading.node_connection import connect_all
from serve.loading.precision import Precision
from serve.loading.rank_memory import make_accounting
from serve.loading.runtime import Runtime, log_sizes
from serve.machine import usable_processors
from serve.models.progress import LoadProgress
from serve.models.shard import check_heads
from serve.setting_checks import DRAFT_HEADS
from serve.units import format_memory
from transport.base import TransportError

if TYPE_CHECKING:
    from serve.group.holders import GroupHolders, HeldGroupRecovery
    from serve.loading.kvp import SegmentSizes

logger = logging.getLogger(__name__)

AnyWorkers = LocalWorkers | RemoteWorkers
_LOAD_S = 3600.0  # a dead worker is seen at once
_SLICE_S = 0.25
REPORT_S = 10.0  # between two lines about workers that load


@dataclass(slots=True)
class GroupRuntime:
    """A loaded group. make_recovery: as EngineCore takes it; with holders (`runtime.nodes`) it
    takes first what makes their recovery, as EngineCore does."""

    runtime: Runtime
    make_recovery: Callable[..., GroupRecovery | HeldGroupRecovery]


def start_group(
    config: EngineConfig, progress: LoadProgress, kv_share: float = 1.0
) -> GroupRuntime:
    """Starts the workers of a config with more than one rank, or waits for those that others start,
    and loads the model on all of them. kv_share: the part of each machine's K/V memory that is the
    model's; the rest is a draft model's.

    Call it in the compute thread. Raises ConfigError, ModelLoadError and MergestepError.
    """
    _check(config)
    size, member = config.num_ranks, read_membership(config)
    size_here = size if member is None else member.local_size
    config = replace(config, compute_threads=threads_of_a_rank(config, size_here))
    source = read_source(config, 0 if member is None else member.local_rank)
    grid = make_grid(source)
    if member is None:  # all ranks share this machine's memory, or its devices
        check_weights_fit(*source[:3], num_devices=_num_devices(source.precision, size))
    workers = LocalWorkers() if member is None else _remote_workers(config, member)
    links: list[WorkerLink] = []
    try:
        loader = WorkerLoader(workers, source, grid)
        links = loader.spawn(range(1, size), progress.check)
        check, poll = _both(progress.check, links), _both(progress.poll, links)
        own = Rank(source, grid, 0, replace(progress, check=check, poll=poll))
        loader.await_ready(links, progress.check)
    except BaseException as error:
        end_workers(links)
        workers.close()
        if isinstance(error, (TransportError, WorkerFailed)):
            raise MergestepError(f"starting the group failed: {error}") from error
        raise
    group = Group(own, grid, links, workers.key, workers.note_silence)
    try:
        return _form(source, grid, group, workers, loader, kv_share)
    except BaseException as error:
        group.close()
        workers.close()
        if isinstance(error, GroupLostError):
            raise MergestepError(f"starting the group failed: {error}") from error
        raise


def _num_devices(precision: Precision, num_ranks: int) -> int:
    """Returns how many memories of this machine the ranks use."""
    if precision.backend != "cuda" or not torch.cuda.is_available():
        return 1
    return min(num_ranks, torch.cuda.device_count())


def _remote_workers(config: EngineConfig, member: Membership) -> RemoteWorkers:
    if member.rank:
        raise ConfigError(f"this process is rank {member.rank}, which `serve run` alone runs")
    return RemoteWorkers(member, read_group_key(config, member))


def _form(
    source: ModelSource,
    grid: Grid,
    group: Group,
    workers: AnyWorkers,
    loader: WorkerLoader,
    kv_share: float,
) -> GroupRuntime:
    config, spec, precision, *_ = source
    free = kv_bytes_of_a_rank(config, group.own.room, list(group.links.values()))
    free = max(1, int(free * kv_share))
    shards = [replace(shard_of(grid, rank), exchange=None) for rank in range(grid.size)]
    unit_bytes = None if group.own.device is None else group.own.device.unit_bytes
    own, recorder, geometry, sizes = make_accounting(
        config, spec, precision, shards, free, unit_bytes=unit_bytes
    )
    group.form(geometry)
    secret = None
    if group.own.tier is not None:
        secret, store = group.own.tier.secret, GroupStore(group, recorder)
        own.prefixes.use_store(store, int, lambda: None, wait_for=store.wait_for)
    make_group: Callable[..., GroupRecovery] = functools.partial(
        GroupRecovery, group, own, recorder, loader.start, config.group_restart_s
    )
    make: Callable[..., GroupRecovery | HeldGroupRecovery] = make_group
    kv: KVManager | SegmentedKV = own
    nodes: GroupHolders | None = None
    if sizes is not None:
        assert isinstance(recorder, HeldEditRecorder), "records edits of holders"
        kv, nodes, make = _with_holders(config, group, own, recorder, sizes, make_group)
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
        secret,
        nodes=nodes,
        runner=runner,
        weight_peers=source.peers,
    )
    return GroupRuntime(runtime, make)


def _with_holders(
    config: EngineConfig,
    group: Group,
    own: KVManager,
    recorder: HeldEditRecorder,
    sizes: SegmentSizes,
    make_group: Callable[..., GroupRecovery],
) -> tuple[SegmentedKV, GroupHolders, Callable[..., HeldGroupRecovery]]:
    """Attaches all ranks to the holders; returns all memory as one, the holders, and what makes the
    recovery. ConfigError names the setting."""
    from serve.group.holders import GroupHolders, HeldGroupRecovery
    from serve.loading import kvp

    nodes = GroupHolders(group, sizes, config.memory_node_bytes)
    connect_all("kvp", nodes)
    memories = kvp.account(config, sizes, nodes)
    recorder.record([partition.edits for partition in nodes.partitions])
    holders = kvp.HolderMemory(
        nodes, memories, sizes.max_model_len, sizes.per_holder, sizes.setting
    )
    kv = kvp.join(own, holders, config.kvp_segment_tokens)
    make = functools.partial(HeldGroupRecovery, group, nodes, memories, make_group)
    return kv, nodes, make


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
        """Waits until workers are loaded; logs now and then how far the slowest one is."""
        end_s, report_s = time.monotonic() + _LOAD_S, time.monotonic() + REPORT_S
        waiting = list(links)
        while waiting:
            check()
            for link in list(waiting):  # all, since each says how far it is
                ready = link.next_json(Kind.READY, _SLICE_S / len(waiting))
                if ready is not None:
                    _note_ready(link, ready)
                    waiting.remove(link)
            if waiting and time.monotonic() > end_s:
                raise TransportError(f"rank {waiting[0].rank} did not load within {_LOAD_S:.0f} s")
            if waiting and time.monotonic() > report_s:
                report_s += REPORT_S
                self._report(waiting)

    def _report(self, waiting: Sequence[WorkerLink]) -> None:
        """Logs the progress of the rank that has the most layers to load."""

        def left(link: WorkerLink) -> int:
            return self._num_layers(link) - link.num_layers

        slowest = max(waiting, key=left)
        logger.info(
            "loading: rank %d has %d of %d layers; %d of %d workers are still loading",
            slowest.rank,
            slowest.num_layers,
            self._num_layers(slowest),
            len(waiting),
            self._grid.size - 1,
        )

    def _num_layers(self, link: WorkerLink) -> int:
        return self._grid.stages[self._grid.place(link.rank).stage][1]


def _note_ready(link: WorkerLink, ready: dict[str, Any]) -> None:
    link.url, link.host = str(ready.get("url", "")), str(ready.get("host", ""))
    link.sibling_url = str(ready.get("sibling_url", ""))
    link.free_bytes = int(ready.get("free_bytes", 0))
    link.device = str(ready.get("device", ""))
    link.needed_bytes = int(ready.get("needed_bytes", 0))


def make_grid(source: ModelSource) -> Grid:
    """Returns the ranks of a model. ConfigError names the setting that does not fit."""
    config, spec, converter = source.config, source.spec, source.converter
    tensor, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if spec.state_layers:
        raise ConfigError(
            "tensor_parallel_size and pipeline_parallel_size: models whose layers have states"
            f" ({spec.model_type}) are served by one rank"
        )
    for layer in set(spec.layers):
        assert layer.attention is not None, "a model without states"
        check_heads(layer.attention, tensor)
    starts = None if converter is None else converter.stage_starts
    return Grid(tensor, layer_stages(spec, num_stages, starts, config.max_model_len))


def _check(config: EngineConfig) -> None:
    """Refuses settings that a group does not have."""
    for name in ("memory_nodes", "borrow", "lend"):
        if getattr(config, name):
            raise ConfigError(f"{name} needs a model on one rank, not {config.num_ranks}")
    for name in ("kvp", "kv_cache_dir"):
        if getattr(config, name) and config.backend == "cuda":
            raise ConfigError(f"{name} with several ranks needs the cpu back end")


def _both(check: Callable[[], object], links: Sequence[WorkerLink]) -> Callable[[], object]:
    """Returns a check that also ends the loading when a worker is gone."""

    def check_both() -> None:
        check()
        for link in links:
            if link.is_lost:
                raise MergestepError(f"rank {link.rank}: {link.state}")

    return check_both


def _as_json(config: EngineConfig) -> dict[str, object]:
    """Returns the settings as JSON; workers predict no lengths, and have no head that drafts."""
    own = replace(config, length_predictor="history", length_predictor_file=None)
    if own.speculation in DRAFT_HEADS:  # the engine's rank has the head
        own = replace(own, speculation="off", draft_model=None)
    values = dataclasses.asdict(own)
    values["model"] = str(config.model_path)
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in values.items()
    }


def _log_grid(source: ModelSource, grid: Grid) -> None:
    stages = [
        f"layers {first} to {first + count - 1} with {format_memory(size)}"
        for (first, count), size in zip(
            grid.stages, weight_bytes_of_ranks(source, grid), strict=True
        )
    ]
    logger.info(
        "%d ranks: %s of %s, %s each; weights of a rank: %s",
        grid.size,
        _counted(grid.num_stages, "stage"),
        _counted(grid.tensor, "tensor rank"),
        _counted(source.config.compute_threads or usable_processors(), "thread"),
        ", ".join(stages),
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
