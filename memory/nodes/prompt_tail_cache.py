"""The prompt tail cache: the engine's own copy of K/V of prompts that are being prefilled.

Prefill attention needs much arithmetic, which memory nodes have little of. So the engine keeps the
K/V of a prompt while it computes the chunks, and attends over it locally. The nodes receive each
layer's K/V as soon as it exists, write it between answers (node_loop.py), and have all of it when
the prompt's first token is decoded. If the cache has no room for a prompt, or the prompt begins
with tokens of the prefix cache, which only the nodes have, the nodes attend over it instead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from memory.attention.layouts import Layout, make_layout
from memory.kv_manager import KVManager
from memory.nodes.attach import STRIPE_TOKENS, AttachRequest, NodeLayout
from memory.nodes.placement import page_geometry
from memory.pages.kv_range import Range
from memory.pages.layer_groups import LayerGroup
from memory.pages.linux_vmm import LinuxMemory
from memory.pages.virtual_memory import VirtualMemory

logger = logging.getLogger(__name__)

_MAX_PROMPTS = 64


class TailSpan(NamedTuple):
    """A prompt's tokens in the cache: the first one's index in the cache's memory, and their
    number, this step's included."""

    start: int
    num_tokens: int


@dataclass(slots=True)
class TailPages:
    """Memory for the cache. layout: that of the K/V in this machine's memory; None on a device,
    whose attention has its own."""

    memory: VirtualMemory
    num_pages: int
    group: LayerGroup
    layout: Layout | None


@dataclass(slots=True)
class _Tail:
    """A prompt's range in the cache. first: position of the first cached token. end: position
    after the last one."""

    range: Range
    first: int
    end: int


class PromptTailCache:
    """K/V of prompts, with all layers of a token side by side. Only the compute thread uses it."""

    def __init__(
        self,
        template: AttachRequest,
        max_model_len: int,
        num_bytes: int,
        pages: TailPages | None = None,
    ) -> None:
        """template gives the shapes and dtype of the K/V. The cache uses at most num_bytes of this
        machine's memory, or the given pages, which it closes."""
        layers = template.layers
        # The cache holds a prompt from its first token on, unless results are merged. Nodes count
        # sliding windows from the end of their K/V, so with windows nothing is merged here.
        has_windows = any(layer.window is not None for layer in layers)
        self._is_whole = has_windows or not template.prefix_only
        count = min(_MAX_PROMPTS, template.num_ranges)
        if pages is None:
            pages = _host_pages(template, max_model_len, num_bytes, count)
        self.layout = pages.layout
        self.is_usable = pages.num_pages > 0
        self._memory = pages.memory
        self._kv = KVManager(
            self._memory,
            num_pages=max(1, pages.num_pages),
            num_ranges=count,
            max_model_len=max_model_len,
            groups=[pages.group],
            in_background=False,
        )
        self.size_bytes = self._kv.total_bytes
        self.address = self._memory.reserve(self.size_bytes)
        self._tails: dict[int, _Tail] = {}

    def extend(self, start: int, num_prefix: int, num_rows: int) -> tuple[TailSpan, int] | None:
        """Makes room for num_rows more rows of the prompt whose range begins at `start`.

        num_prefix is the position of the first of them. Returns the prompt's span and the position
        of its first cached token; None if the cache does not hold the prompt.
        """
        tail = self._tails.get(start)
        if tail is not None and tail.end != num_prefix:
            self.drop(start)
            tail = None
        if tail is None:
            if self._is_whole and num_prefix:
                return None
            if not (self.is_usable and self._kv.can_fit(num_rows)):
                return None
            tail = _Tail(self._kv.open(num_rows), num_prefix, num_prefix)
            self._tails[start] = tail
        length = num_prefix + num_rows - tail.first
        if not self._kv.grow(tail.range, length):
            self.drop(start)
            return None
        try:
            self._kv.commit([tail.range])
        except OSError as error:  # the nodes attend over this prompt instead
            logger.warning("no memory to keep a prompt: %s", error)
            self.drop(start)
            return None
        tail.end = num_prefix + num_rows
        return TailSpan(tail.range.start, length), tail.first

    def drop(self, start: int) -> None:
        """Frees a prompt's K/V, after its prefill or when its sequence ends."""
        tail = self._tails.pop(start, None)
        if tail is not None:
            self._kv.close(tail.range)

    @property
    def num_pages_in_use(self) -> int:
        return self._kv.num_in_use

    def trim(self) -> None:
        self._kv.trim()

    def clear(self) -> None:
        """Drops all prompts and returns the memory to the system."""
        if self._kv.num_mapped:
            for start in list(self._tails):
                self.drop(start)
            self._kv.trim()

    def close(self) -> None:
        self._kv.close_all()
        self._memory.close()


def _host_pages(
    template: AttachRequest, max_model_len: int, num_bytes: int, num_ranges: int
) -> TailPages:
    """Returns pages of this machine's memory, of num_bytes at most."""
    layers = template.layers
    made = make_layout(layers, template.kv_dtype, template.kv_group)
    geometry = page_geometry([made.token_bytes], [None], "request", 1, num_bytes)
    tokens = geometry.page_tokens[0]
    request = AttachRequest(
        engine="tails",
        epoch=1,
        kv_dtype=template.kv_dtype,
        kv_group=template.kv_group,
        layers=list(layers),
        group_layers=[list(range(len(layers)))],
        page_tokens=[tokens],
        num_places=geometry.range_slots(max_model_len),
        num_ranges=num_ranges,
        num_pages=1,
        min_pages=1,
        max_rows=template.max_rows,
    )
    layout = NodeLayout(request)
    num_pages = num_bytes // layout.page_bytes
    return TailPages(
        LinuxMemory(layout.page_bytes, max(1, num_pages)),
        num_pages,
        LayerGroup(layout.page_bytes // tokens, STRIPE_TOKENS),
        layout.groups[0],
    )
