"""How much memory each rank of a group takes for weights, and may take for K/V."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.group.grid import Grid
from serve.group.links.worker_link import WorkerLink
from serve.group.rank import RankRoom
from serve.loading.footprint import weight_bytes
from serve.loading.model_source import ModelSource
from serve.machine import KV_SHARE_OF_FREE_MEMORY, available_memory, local_kv_bytes
from serve.models.shard import Shard
from serve.units import format_memory

logger = logging.getLogger(__name__)


def weight_bytes_of_ranks(source: ModelSource, grid: Grid) -> list[int]:
    """Returns the bytes of the weights of one rank in each stage, as predicted from the model's
    shapes. The first stage has the table of embeddings, the last one the head."""
    config, spec, precision, *_ = source
    if spec.counts is not None:  # a converted model, whose layers are not described
        whole = weight_bytes(config, spec, precision).total
        return [whole * count // spec.num_layers // grid.tensor for _, count in grid.stages]
    sizes = []
    for number, stage in enumerate(grid.stages):
        found = weight_bytes(config, Shard(layers=stage).spec(spec), precision)
        divided = found.blocks + found.experts
        divided += found.head if number + 1 == grid.num_stages else 0.0
        divided += found.tables if number == 0 else 0.0
        sizes.append(int(divided / grid.tensor + found.others))
    return sizes


def kv_bytes_of_a_rank(config: EngineConfig, own: RankRoom, links: Sequence[WorkerLink]) -> int:
    """Returns what each rank may take for K/V: the least of all hosts, or devices, whose ranks
    share it. Call it when all ranks are loaded. ConfigError if a device has too little."""
    if own.device:
        return _device_bytes(config, own, links)
    free_of: dict[str, list[int]] = {socket.gethostname(): [available_memory()]}
    for link in links:
        free_of.setdefault(link.host, []).append(link.free_bytes)
    if len(free_of) == 1:
        return (config.kv_cache_bytes or local_kv_bytes()) // (len(links) + 1)
    return min(
        (config.kv_cache_bytes or int(min(free) * KV_SHARE_OF_FREE_MEMORY)) // len(free)
        for free in free_of.values()
    )


def _device_bytes(config: EngineConfig, own: RankRoom, links: Sequence[WorkerLink]) -> int:
    """Ranks of one device measured its memory one after the other, so the least is what is left
    beside all their weights."""
    here = socket.gethostname()
    rooms: dict[tuple[str, str], list[RankRoom]] = {(here, own.device): [own]}
    ranks_of = {here: 1}
    for link in links:
        room = RankRoom(link.device, link.free_bytes, link.needed_bytes)
        rooms.setdefault((link.host, link.device), []).append(room)
        ranks_of[link.host] = ranks_of.get(link.host, 0) + 1
    least: int | None = None
    for (host, device), shared in rooms.items():
        free, needed = min(each.free for each in shared), sum(each.needed for each in shared)
        left = (free - needed) // len(shared)
        if len(shared) > 1:
            logger.warning("%d ranks share device %s of %s", len(shared), device, host)
        if left <= 0:
            raise ConfigError(
                f"device {device} of {host} has {format_memory(free)} left beside the weights of "
                f"{len(shared)} ranks, and their steps take {format_memory(needed)}; lower "
                "max_num_batched_tokens or use a smaller dtype"
            )
        if config.kv_cache_bytes is not None:
            wanted = config.kv_cache_bytes // ranks_of[host]
            if wanted > left:
                raise ConfigError(
                    f"kv_cache_bytes: {format_memory(wanted)} for each rank asked for, but device "
                    f"{device} of {host} has {format_memory(left)} for each beside the weights and "
                    "the largest steps"
                )
            left = wanted
        least = left if least is None else min(least, left)
    assert least is not None
    return least
