"""Sizes of K/V memory: bytes per page, bytes per token with padding, pages, context length."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memory.pages.layer_groups import LayerGroup, PageLayout
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.machine import available_memory, local_kv_bytes
from serve.models import ModelSpec
from serve.units import format_memory

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_TOKENS_PER_PAGE = 16
_MIN_PAGE_BYTES = 16 << 10
_MAX_PAGE_BYTES = 2 * _MIB
_SYSTEM_PAGE_BYTES = 4096
_LINE_BYTES = 64
# Linux allows 65,530 mappings in a process; every page can become one of them.
_MAX_PAGES = 30_000


@dataclass(frozen=True, slots=True)
class KVSizes:
    """Sizes of K/V memory. groups: layer groups with bytes per token, padding included."""

    page_bytes: int
    groups: list[LayerGroup]
    num_pages: int
    max_model_len: int


def size_kv(
    config: EngineConfig,
    spec: ModelSpec,
    groups: Sequence[LayerGroup],
    *,
    free_bytes: int | None = None,
    unit_bytes: int | None = None,
) -> KVSizes:
    """Returns pages and context length that fit the memory. ConfigError names the setting.

    free_bytes: K/V bytes if no setting gives them; by default a part of this machine's memory.
    unit_bytes: page size of the device; by default a page size is chosen for this machine.
    """
    max_len = spec.max_model_len
    if config.max_model_len is not None:
        if config.max_model_len > max_len:
            raise ConfigError(
                f"max_model_len {config.max_model_len} is above the model's {max_len}"
            )
        max_len = config.max_model_len
    if free_bytes is None:
        _warn_of_more_than_free(config)
        free_bytes = local_kv_bytes()
    budget = config.kv_cache_bytes or free_bytes
    # More than all sequences at full length is never used.
    token_bytes = sum(group.token_bytes for group in groups)
    budget = min(budget, config.max_num_seqs * (max_len * token_bytes + _MAX_PAGE_BYTES))
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
    pages_for = PageLayout(padded, page, max_len, config.chunk_tokens).pages_for
    fits = bisect_right(range(1, max_len + 1), num_pages, key=pages_for)
    if fits < max_len:
        if config.kv_cache_bytes is not None or config.max_model_len is not None or fits < 1:
            raise ConfigError(
                f"kv_cache_bytes {budget} holds {fits} tokens, less than one sequence of "
                f"max_model_len {max_len}; raise the one or lower the other"
            )
        logger.warning("memory holds %d tokens; max_model_len is lowered from %d", fits, max_len)
        max_len = fits
    return KVSizes(page, padded, num_pages, max_len)


def _warn_of_more_than_free(config: EngineConfig) -> None:
    """Logs a warning if kv_cache_bytes exceeds the memory that is free now."""
    free, wanted = available_memory(), config.kv_cache_bytes
    if wanted is not None and wanted > free:
        logger.warning(
            "kv_cache_bytes %s is more than the %s that are free now",
            format_memory(wanted),
            format_memory(free),
        )


def _padded_for(groups: Sequence[LayerGroup], page_bytes: int) -> list[LayerGroup]:
    """Returns the groups padded for pages of page_bytes, as `_page_of_groups` pads them.

    Tiles cross pages if padding would cost too much.
    """
    padded = []
    for group in groups:
        tile = group.token_bytes * group.tile_tokens
        if page_bytes >= tile:
            tile = _tile_in(page_bytes, tile)
        padded.append(replace(group, token_bytes=tile // group.tile_tokens))
    return padded


def _page_of_groups(groups: Sequence[LayerGroup], budget: int) -> tuple[int, list[LayerGroup]]:
    """Returns the bytes of a page, chosen for the widest group, and the groups padded for it."""
    widest = max(groups, key=lambda group: group.token_bytes)
    page, tile = _page_of_tiles(widest.token_bytes * widest.tile_tokens, widest.tile_tokens, budget)
    tiles = [
        tile if group is widest else _tile_in(page, group.token_bytes * group.tile_tokens)
        for group in groups
    ]
    return page, [
        replace(group, token_bytes=tile // group.tile_tokens)
        for group, tile in zip(groups, tiles, strict=True)
    ]


def _tile_in(page_bytes: int, tile_bytes: int) -> int:
    """Returns the tile stride in bytes with which tiles divide a page, if the padding is small.

    Otherwise tiles cross pages.
    """
    count = page_bytes // tile_bytes
    while count and page_bytes <= 1.02 * count * tile_bytes:
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
    while tiles * tile_tokens < _TOKENS_PER_PAGE and 2 * tiles * tile_bytes <= _MAX_PAGE_BYTES:
        tiles *= 2
    while tiles * tile_bytes < _MIN_PAGE_BYTES or budget // (tiles * tile_bytes) > _MAX_PAGES:
        tiles *= 2
    if _padded(tile_bytes, tiles) > 1.02 * tile_bytes:  # a larger page wastes less
        tiles *= 2
    padded = _padded(tile_bytes, tiles)
    return tiles * padded, padded


def _padded(tile_bytes: int, tiles: int) -> int:
    """Returns the tile stride in bytes with which `tiles` tiles fill whole system pages."""
    unit = max(_LINE_BYTES, _SYSTEM_PAGE_BYTES // tiles)
    return -(-tile_bytes // unit) * unit
