"""Sequences whose K/V and states lie in real pages, beside a model that knows every value.

A state is a hash of all tokens before it, computed from the state that the memory holds: one that
is read from a wrong record, or was overwritten, gives wrong ones from there on.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from memory.attention.seam import AttentionStep
from memory.kv_manager import KVManager
from memory.pages.allocator import PageAllocator
from memory.pages.kv_range import Range
from memory.pages.layer_groups import LayerGroup
from memory.pages.linux_vmm import LinuxMemory
from memory.prefix.index import PrefixHasher
from memory.states.layout import StateLayer, StateLayout
from memory.states.local import LocalStates
from ops.reference_states import ReferenceStates

PAGE = 4096
# a convolution alone, and one beside a recurrence
LAYERS = [StateLayer((2, 3)), StateLayer((3, 5), (2, 3, 4))]
_MODULUS = 65_521  # fp32 holds such numbers exactly
_PATTERN = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
_OPS = ReferenceStates()


def next_hash(number: int, token: int) -> int:
    return (31 * number + token + 7) % _MODULUS


@dataclass
class Text:
    """Token ids of a sequence, and what it is shared with."""

    tokens: list[int]
    salt: str
    hashes: list[int] = field(default_factory=lambda: [0])
    """The hash of the first n tokens, for each n."""

    def hash_of(self, num_tokens: int) -> int:
        for token in self.tokens[len(self.hashes) - 1 : num_tokens]:
            self.hashes.append(next_hash(self.hashes[-1], token))
        return self.hashes[num_tokens]

    def copy(self) -> Text:
        return replace(self, tokens=list(self.tokens), hashes=list(self.hashes))


@dataclass(eq=False)
class Running:
    text: Text
    kv_range: Range
    num_computed: int
    keys: list[bytes]


class StatesModel:
    """K/V groups and records of states on a small pool of this machine's pages."""

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        *,
        interval: int,
        record_pages: int = 1,
        num_pages: int = 60,
        num_ranges: int = 6,
        max_model_len: int = 160,
        max_rows: int = 24,
        in_background: bool = False,
    ) -> None:
        layout = StateLayout(LAYERS, interval)
        layout.pad(record_pages * PAGE)
        self.layout, self.interval, self.max_rows = layout, interval, max_rows
        self.memory = LinuxMemory(PAGE, num_pages)
        self.kv = KVManager(
            self.memory,
            num_pages=num_pages,
            num_ranges=num_ranges,
            max_model_len=max_model_len,
            groups=(*groups, layout.group()),
            max_rows=max_rows,
            in_background=in_background,
        )
        address = self.memory.reserve(self.kv.total_bytes)
        first, end = (self.kv.group_offset(len(groups) + i) for i in (0, 1))
        self.states = LocalStates(layout, address + first, end - first)
        views = self.states.layers
        self._records = [(c.numpy(), None if h is None else h.numpy()) for c, h, _ in views]
        self._kv = [self._kv_values(address, number) for number in range(len(groups))]
        self.hasher = PrefixHasher(self.kv.page_end, b"secret")
        self.running: list[Running] = []

    def _kv_values(self, address: int, number: int) -> np.ndarray:
        return kv_values(self.kv, address, number)

    # ---- where they lie

    def record_start(self, start: int) -> int:
        """Returns where the records of a sequence begin, in tokens."""
        return start

    def kv_rows(self, start: int) -> list[np.ndarray]:
        """Returns each group's K/V from the first token of a sequence on."""
        return [values[start:] for values in self._kv]

    @property
    def record_pages(self) -> PageAllocator:
        return self.kv.allocator

    def evict(self, count: int) -> None:
        """Evicts at most so many pages."""
        for _ in range(count):
            if self.kv.prefixes.num_evictable:
                self.kv.prefixes.evict()

    @property
    def num_evicted(self) -> int:
        return self.kv.prefixes.stats.num_evicted

    # ---- sequences

    def keys_of(self, text: Text) -> list[bytes]:
        keys: list[bytes] = []
        self.hasher.extend(keys, text.tokens, text.salt)
        return keys

    def open(self, text: Text, *, use_hit: bool = True) -> Running | None:
        """Opens a sequence with what the cache has of it; None if it does not fit."""
        keys = self.keys_of(text)
        hit = self.kv.match(keys, len(text.tokens) - 1) if use_hit else None
        if not self.kv.can_fit(len(text.tokens), hit=hit):
            return None
        assert hit is None or hit.num_tokens % self.interval == 0
        num_computed = 0 if hit is None else hit.num_tokens
        found = Running(text, self.kv.open(len(text.tokens), hit), num_computed, keys)
        self.running.append(found)
        return found

    def close(self, sequence: Running) -> None:
        self.kv.close(sequence.kv_range)
        self.running.remove(sequence)

    def grow(self, sequence: Running, rows: int) -> bool:
        """Gives the sequence memory for so many rows after those that are computed."""
        end = sequence.num_computed + rows
        return self.kv.grow(sequence.kv_range, end, sequence.num_computed)

    def run(self, step: list[tuple[Running, int]], *, fails: bool = False) -> None:
        """Computes so many rows of each sequence, which have memory. fails: it ends after the first
        layer, and the sequences stay as they were but for what the rows have overwritten."""
        self.kv.commit([sequence.kv_range for sequence, _ in step])
        for sequence, _ in step:
            self.check_reads(sequence)
        ends = [sequence.num_computed + rows for sequence, rows in step]
        plan = self.states.plan(
            AttentionStep(
                0,
                [self.record_start(sequence.kv_range.start) for sequence, _ in step],
                [rows for _, rows in step],
                ends,
            )
        )
        tokens = [
            token
            for (sequence, _), end in zip(step, ends, strict=True)
            for token in sequence.text.tokens[sequence.num_computed : end]
        ]
        for number, layer in enumerate(LAYERS):
            state = plan.layer(number)
            inputs = torch.tensor(tokens, dtype=torch.float32)[:, None]
            inputs = inputs + torch.arange(layer.conv[1])
            weight = torch.ones(layer.conv[1], layer.conv[0] + 1)
            _OPS.causal_conv(inputs, weight, None, None, state.conv, state.segments)
            if fails:
                return
            if state.heads is not None:
                _recur(tokens, state.heads.numpy(), state.segments)
        for (sequence, _), end in zip(step, ends, strict=True):
            self._write_kv(sequence, end)
            sequence.num_computed = end
            self.hasher.extend(sequence.keys, sequence.text.tokens, sequence.text.salt)
            self.kv.insert_prefix(sequence.kv_range, sequence.keys, end)
            self.check_reads(sequence)

    def _write_kv(self, sequence: Running, end: int) -> None:
        for values in self.kv_rows(sequence.kv_range.start):
            for position in range(sequence.num_computed, end):
                values[position] = sequence.text.hash_of(position + 1)

    # ---- what is read

    def check_reads(self, sequence: Running) -> None:
        """Checks the record that the next row reads, and the K/V in its reach."""
        num_computed, start = sequence.num_computed, sequence.kv_range.start
        if not num_computed:
            return
        text = sequence.text
        record = (self.record_start(start) + num_computed - 1) // self.interval
        for layer, (conv, heads) in zip(LAYERS, self._records, strict=True):
            inputs, channels = layer.conv
            last = text.tokens[max(0, num_computed - inputs) : num_computed]
            assert not conv[record, : inputs - len(last)].any()
            expected = np.array(last)[:, None] + np.arange(channels)
            assert (conv[record, inputs - len(last) :] == expected).all(), num_computed
            if heads is not None:
                assert (heads[record] == text.hash_of(num_computed) + _PATTERN).all(), num_computed
        text.hash_of(num_computed)
        for values, group in zip(self.kv_rows(start), self.kv.layout.groups, strict=False):
            first = 0 if group.window is None else max(0, num_computed + 1 - group.window)
            if group.by_block:
                first = num_computed // group.window * group.window
            found = values[first:num_computed]
            expected = np.array(text.hashes[first + 1 : num_computed + 1])[:, None]
            assert (found == expected).all(), f"{group.layers} of {num_computed} tokens"

    def check(self) -> None:
        self.kv.check_integrity()
        for sequence in self.running:
            each = sequence.kv_range.parts[-1].group.slots_for(1)
            # a step's rows, and the record before them
            most = -(-(self.max_rows + self.interval) // self.interval) + 1
            assert len(sequence.kv_range.parts[-1].held) <= most * each
            if all(part.is_committed for part in sequence.kv_range.parts):
                self.check_reads(sequence)

    def finish(self) -> None:
        """Ends all sequences; everything must be back then."""
        for sequence in list(self.running):
            self.close(sequence)
        self.kv.check_integrity()
        assert self.kv.num_in_use == 0
        self.kv.close_all()
        self.kv.check_integrity()
        assert (self.kv.num_mapped, self.kv.num_in_use, self.kv.num_cached) == (0, 0, 0)
        assert self.kv.allocator.num_free == self.kv.num_pages
        self._kv.clear()
        self._records.clear()
        self.memory.close()


def kv_values(kv: KVManager, address: int, number: int) -> np.ndarray:
    """Returns the K/V of a group: a row of values for each token of all ranges."""
    offset, end = kv.group_offset(number), kv.group_offset(number + 1)
    memory = (ctypes.c_char * (end - offset)).from_address(address + offset)
    width = kv.layout.groups[number].token_bytes // 4
    return np.frombuffer(memory, dtype=np.float32).reshape(-1, width)


def _recur(tokens: list[int], heads: np.ndarray, segments) -> None:
    firsts = segments.firsts.tolist()
    records = zip(segments.sources.tolist(), segments.targets.tolist(), strict=True)
    for (first, end), (source, target) in zip(pairwise(firsts), records, strict=True):
        number = 0
        if source >= 0:
            number = int(heads[source, 0, 0, 0])
            assert (heads[source] == number + _PATTERN).all(), "half of a state was overwritten"
        for token in tokens[first:end]:
            number = next_hash(number, token)
        heads[target] = number + _PATTERN
