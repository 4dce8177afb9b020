"""The layout of a record: the states of all layers at one position of a sequence, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from memory.pages.layer_groups import LayerGroup

MIN_INTERVAL, MAX_INTERVAL = 64, 128
# A record may take this many times the bytes of the K/V of its interval.
_SHARE = 4
_LINE_VALUES = 16  # fp32 values of a cache line


@dataclass(frozen=True, slots=True)
class StateLayer:
    """The state of one layer. conv: (inputs, channels), the inputs that a convolution needs again;
    heads: (heads, key dim, value dim) of a recurrence, None without one. num_gates: the values of
    a row that its recurrence takes beside the channels."""

    conv: tuple[int, int]
    heads: tuple[int, int, int] | None = None
    num_gates: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of the state of one sequence."""
        return 4 * (prod(self.conv) + (0 if self.heads is None else prod(self.heads)))

    @property
    def row_values(self) -> int:
        """The values of a row from which the layer's operators compute everything."""
        return self.conv[1] + self.num_gates


class StateLayout:
    """The places of all layers' states in a record.

    offsets: for each layer those of its conv, heads and drafted rows, in fp32 values. interval:
    the tokens from one record to the next. num_drafts: the rows of a draft for which there is
    room. record_values: the values of a record with its padding.
    """

    def __init__(self, layers: Sequence[StateLayer], interval: int, num_drafts: int = 0) -> None:
        self.layers = list(layers)
        self.interval = interval
        self.num_drafts = num_drafts
        self.offsets: list[tuple[int, int, int]] = []
        end = 0
        states: list[tuple[int, int]] = []
        for layer in self.layers:
            heads_at = end + _lines(prod(layer.conv))
            states.append((end, heads_at))
            end = heads_at + (0 if layer.heads is None else _lines(prod(layer.heads)))
        # drafted rows come last, so that places of states do not depend on them: snapshots on disk
        # outlive the settings
        for layer, (conv_at, heads_at) in zip(self.layers, states, strict=True):
            self.offsets.append((conv_at, heads_at, end))
            end += _lines(num_drafts * layer.row_values)
        self.record_values = end
        self.pad(-(-self.record_bytes // interval) * interval)

    @property
    def record_bytes(self) -> int:
        return 4 * self.record_values

    def pad(self, record_bytes: int) -> None:
        """Pads a record, so that it is whole pages."""
        assert record_bytes >= self.record_bytes and record_bytes % 4 == 0, f"{record_bytes=}"
        self.record_values = record_bytes // 4

    def group(self) -> LayerGroup:
        """Returns the layer group of the records: a row reads the state of the one before it."""
        return LayerGroup(
            self.record_bytes // self.interval,
            self.interval,
            window=2,
            read_block=self.interval,
            is_state=True,
        )


def choose_interval(record_bytes: int, kv_token_bytes: int) -> int:
    """Returns the tokens between records by what they cost: a power of two from MIN_INTERVAL to
    MAX_INTERVAL at which a record takes at most four times the K/V of its tokens, if there is
    one. More records reuse more of a prefix, and take more memory while it is free."""
    interval = MIN_INTERVAL
    while interval < MAX_INTERVAL and record_bytes > _SHARE * interval * kv_token_bytes:
        interval *= 2
    return interval


def _lines(values: int) -> int:
    return -(-values // _LINE_VALUES) * _LINE_VALUES
