"""Sizes of K/V memory: bytes per page, bytes per token with padding, pages, context length."""

from __future__ import annotations

import errno
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from memory.attention.seam import AttentionLayer
from memory.pages.layer_groups import LayerGroup, PageLayout, kept_bytes
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.machine import available_memory, local_kv_bytes, total_memory
from serve.units import format_memory

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_TOKENS_PER_PAGE = 16
_MIN_PAGE_BYTES = 16 << 10
MAX_PAGE_BYTES = 2 * _MIB
_SYSTEM_PAGE_BYTES = 4096
_LINE_BYTES = 64
_MOST_PADDING = 1.02  # of tiles
# Linux allows 65,530 mappings in a process; every page can become one of them.
_MAX_PAGES = 30_000


@dataclass(frozen=True, slots=True)
class KVSizes:
    """Sizes of K/V memory. groups: layer groups with bytes per token, padding included."""

    page_bytes: int
    groups: list[LayerGroup]
    num_pages: int
    max_model_len: int


class HasContext(Protocol):
    """What the sizes of K/V depend on beside its layers, such as a ModelSpec."""

    @property
    def max_model_len(self) -> int: ...


def size_kv(
    config: EngineConfig,
    spec: HasContext,
    groups: Sequence[LayerGroup],
    *,
    free_bytes: int | None = None,
    unit_bytes: int | None = None,
    is_trial: bool = False,
    setting: str = "kv_cache_bytes",
) -> KVSizes:
    """Returns pages and context length that fit the memory. ConfigError names the setting.

    free_bytes: K/V bytes if no setting gives them; by default a part of this machine's memory.
    unit_bytes: page size of the device; by default a page size is chosen for this machine.
    is_trial: the sizes are only a statement, and no change of settings is logged.
    setting: what errors call the K/V bytes.
    """
    max_len = spec.max_model_len
    if config.max_model_len is not None:
        if config.max_model_len > max_len:
            raise ConfigError(
                f"max_model_len {config.max_model_len} is above the model's {max_len}"
            )
        max_len = config.max_model_len
    most = _most_used(config, groups, max_len)
    if config.kv_cache_bytes is not None:
        budget = _granted(config.kv_cache_bytes, most, free_bytes)
    else:
        budget = min(local_kv_bytes() if free_bytes is None else free_bytes, most)
    page, padded = config.kv_page_bytes or unit_bytes, list(groups)
    if page is None:
        page, padded = _page_of_groups(groups, budget)
    elif page > budget:
        raise ConfigError(f"kv_page_bytes {page} is more than the K/V memory of {budget} bytes")
    elif unit_bytes is None and budget // page > _MAX_PAGES:
        raise ConfigError(
            f"kv_page_bytes {page} gives more than {_MAX_PAGES} pages; use a larger page"
        )
    else:
        padded = _padded_for(groups, page)
    num_pages = budget // page
    least = sum(-(-group.token_bytes * group.tile_tokens // page) for group in padded)
    if least > num_pages:  # before each page of the longest context gets a number
        raise ConfigError(
            f"{setting} {budget} holds not even {format_memory(least * page)}, the K/V and"
            " states of a sequence's first tokens"
        )
    pages_for = PageLayout(padded, page, max_len, config.chunk_tokens).pages_for
    fits = bisect_right(range(1, max_len + 1), num_pages, key=pages_for)
    if fits < max_len:
        if config.kv_cache_bytes is not None or config.max_model_len is not None or fits < 1:
            raise ConfigError(
                f"{setting} {budget} holds {fits} tokens, less than one sequence of "
                f"max_model_len {max_len}; raise the one or lower the other"
            )
        if not is_trial:
            logger.warning(
                "memory holds %d tokens; max_model_len is lowered from %d", fits, max_len
            )
        max_len = fits
    return KVSizes(page, padded, num_pages, max_len)


def page_bytes_of(config: EngineConfig, groups: Sequence[LayerGroup], max_len: int) -> int:
    """Returns the bytes of a page that `size_kv` gives K/V in this machine's memory."""
    if config.kv_page_bytes is not None:
        return config.kv_page_bytes
    memory = config.kv_cache_bytes or local_kv_bytes()
    return _page_of_groups(groups, min(memory, _most_used(config, groups, max_len)))[0]


def _most_used(config: EngineConfig, groups: Sequence[LayerGroup], max_len: int) -> int:
    """Returns the bytes of all sequences at full length; more are never used."""
    whole = int(_most_bytes(config, groups, max_len) * _MOST_PADDING)
    return config.max_num_seqs * (whole + MAX_PAGE_BYTES)


def _most_bytes(config: EngineConfig, groups: Sequence[LayerGroup], max_len: int) -> int:
    """Returns the most bytes of one sequence, those behind windows included."""
    recent = [group for group in groups if group.by_block]
    spans = [min(max_len, (group.window or 0) + config.chunk_tokens) for group in recent]
    states = sum(group.token_bytes for group in groups if group.is_state)
    whole = max_len * (kept_bytes(groups) + states)
    return whole + sum(n * g.token_bytes for n, g in zip(spans, recent, strict=True))


def _granted(wanted: int, most: int, device_bytes: int | None) -> int:
    """Returns how much of `wanted` is granted, at most `most`. Warns if it exceeds the memory that
    is free now; raises ConfigError if no such memory exists.

    device_bytes: what is free on a device, whose memory no other program gives back.
    """
    granted = min(wanted, most)
    asked = f"kv_cache_bytes: {format_memory(wanted)} asked for"
    if granted < wanted:
        asked += f", of which at most {format_memory(granted)} could be used"
    if device_bytes is not None:
        if granted > device_bytes:
            raise ConfigError(
                f"{asked}, but the device has {format_memory(device_bytes)} beside the weights and"
                " the largest step"
            )
        return granted
    free, total = available_memory(), total_memory()
    if granted > total:
        raise ConfigError(
            f"{asked}, but this machine or its cgroup has {format_memory(total)},"
            f" {format_memory(free)} of them free"
        )
    if granted > free:
        logger.warning("%s, but only %s are free now", asked, format_memory(free))
    elif granted < wanted:
        logger.info("%s by max_num_seqs sequences of max_model_len; no more is granted", asked)
    return granted


def refuse_chunks(layers: Sequence[AttentionLayer], max_len: int, where: str) -> None:
    """Raises ConfigError if layers attend within chunks that end before max_len."""
    chunks = [layer.chunk for layer in layers if layer.chunk is not None]
    if chunks and min(chunks) < max_len:
        raise ConfigError(
            f"max_model_len {max_len} is above the model's attention_chunk_size {min(chunks)}, "
            f"beyond which its layers cannot attend {where}; set max_model_len to it, or serve "
            "the model on the cpu back end"
        )


@contextmanager
def reserving(num_bytes: int, settings: str) -> Iterator[None]:
    """Turns a refusal of the system to reserve addresses into a ConfigError that names the
    settings."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise ConfigError(
            f"{settings}: {format_memory(num_bytes)} of addresses were asked for, and the system"
            " grants none (ulimit -v, vm.max_map_count, vm.overcommit_memory); lower the setting or"
            " raise the limit"
        ) from error


def _padded_for(groups: Sequence[LayerGroup], page_bytes: int) -> list[LayerGroup]:
    """Returns the groups padded for pages of page_bytes, as `_page_of_groups` pads them.

    Tiles cross pages if padding would cost too much.
    """
    padded = []
    for group in groups:
        if group.is_state:
            padded.append(_in_pages(group, page_bytes))
            continue
        tile = group.token_bytes * group.tile_tokens
        if page_bytes >= tile:
            tile = _tile_in(page_bytes, tile)
        padded.append(replace(group, token_bytes=tile // group.tile_tokens))
    return padded


def _page_of_groups(groups: Sequence[LayerGroup], budget: int) -> tuple[int, list[LayerGroup]]:
    """Returns the bytes of a page, chosen for the widest group, and the groups padded for it. Pages
    of several groups without windows (kv_layouts.py) are small, and tiles may cross them."""
    if sum([group.window is None for group in groups]) > 1:
        page = _MIN_PAGE_BYTES
        while budget // page > _MAX_PAGES:
            page *= 2
        return page, _padded_for(groups, page)
    states = [group for group in groups if group.is_state]
    groups = [group for group in groups if not group.is_state]
    widest = max(groups, key=lambda group: group.token_bytes)
    page, tile = _page_of_tiles(widest.token_bytes * widest.tile_tokens, widest.tile_tokens, budget)
    tiles = [
        tile if group is widest else _tile_in(page, group.token_bytes * group.tile_tokens)
        for group in groups
    ]
    padded = [
        replace(group, token_bytes=tile // group.tile_tokens)
        for group, tile in zip(groups, tiles, strict=True)
    ]
    return page, padded + [_in_pages(group, page) for group in states]


def _in_pages(group: LayerGroup, page_bytes: int) -> LayerGroup:
    """Returns the group of states with records of whole pages, so that a page belongs to one."""
    pages = -(-group.token_bytes * group.tile_tokens // page_bytes)
    return replace(group, token_bytes=pages * page_bytes // group.tile_tokens)


def _tile_in(page_bytes: int, tile_bytes: int) -> int:
    """Returns the tile stride in bytes with which tiles divide a page, if the padding is small.

    Otherwise tiles cross pages.
    """
    count = page_bytes // tile_bytes
    while count and page_bytes <= _MOST_PADDING * count * tile_bytes:
        if page_bytes % count == 0 and page_bytes // count % _LINE_BYTES == 0:
            return page_bytes // count
        count -= 1
    return -(-tile_bytes // _LINE_BYTES) * _LINE_BYTES


def _page_of_tiles(tile_bytes: int, tile_tokens: int, budget: int) -> tuple[int, int]:
    """Returns the bytes of a page that holds whole tiles, and of such a slightly padded tile.

    Then a page can be shared as soon as its tokens are computed, and only the last tile wastes
    mapped memory.
    """
    tiles = 1
    while tiles * tile_tokens < _TOKENS_PER_PAGE and 2 * tiles * tile_bytes <= MAX_PAGE_BYTES:
        tiles *= 2
    while tiles * tile_bytes < _MIN_PAGE_BYTES or budget // (tiles * tile_bytes) > _MAX_PAGES:
        tiles *= 2
    if _padded(tile_bytes, tiles) > _MOST_PADDING * tile_bytes:  # a larger page wastes less
        tiles *= 2
    padded = _padded(tile_bytes, tiles)
    return tiles * padded, padded


def _padded(tile_bytes: int, tiles: int) -> int:
    """Returns the tile stride in bytes with which `tiles` tiles fill whole system pages."""
    unit = max(_LINE_BYTES, _SYSTEM_PAGE_BYTES // tiles)
    return -(-tile_bytes // unit) * unit
