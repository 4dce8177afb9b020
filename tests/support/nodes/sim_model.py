"""A model whose tokens show every wrong number of K/V: attention in whole numbers.

Weights are 1 or 2 (a key's component is 0 or ln 2) and values are small integers, so attention
gives a sum of integers over a sum of weights. The first token's value tells the weights' sum, and
the rest is rounded to integers again. No rounding error survives, and a single token that is
missing, moved or foreign changes all tokens that follow.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from memory.attention.seam import AttentionLayer, LayerState
from memory.states.layout import StateLayer
from memory.states.records import LayerRecords, RecordStates
from ops.states import NO_RECORD, StateSegments

NUM_LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 4, 16
FIRST_TOKEN, NUM_TOKENS = 3, 240
STATE_LAYER = StateLayer((1, 1))
_MODULUS = 65_521  # fp32 holds such numbers exactly
_SCALE = DIM**-0.5
_KV_HEAD_OF = torch.arange(HEADS) // (HEADS // KV_HEADS)
_DIMS = torch.arange(DIM)
_MIX = (0x2545F4914F6CDD1D, 0x1B873593CC9E2D51, 0x369DEA0F31A53F85)


def layers() -> list[AttentionLayer]:
    return [AttentionLayer(HEADS, KV_HEADS, DIM, _SCALE, None)] * NUM_LAYERS


def _mixed(*numbers: Tensor | int) -> Tensor:
    """Mixes numbers into non-negative int64 values that depend on all of them."""
    found = torch.zeros((), dtype=torch.int64)
    for number, factor in zip(numbers, _MIX * 2, strict=False):
        found = (found + number + 1) * factor
        found = found ^ (found >> 29)
    return found & (2**62 - 1)


class ExactModel:
    """Decoder over tokens from FIRST_TOKEN on; hidden: [T, 1] int64. has_states: a layer before
    the others keeps a state of one number, which depends on all rows before."""

    def __init__(self, has_states: bool = False) -> None:
        self._has_states = has_states

    def forward(self, input_ids, positions, attention):
        slices = self.slices(input_ids, positions, attention)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                return end.value

    def slices(self, input_ids, positions, attention):
        state = _mixed(input_ids, positions)
        if self._has_states:
            state = _recurrent(state, attention.states.layer(0))
        for layer in range(NUM_LAYERS):
            ticket = attention.begin(layer, _queries(state, layer))
            pending = attention.finish(ticket, *_keys_values(state, positions, layer), None)
            yield
            state = _next_state(state, pending.wait())
        return state[:, None]

    def logits(self, hidden):
        chosen = FIRST_TOKEN + hidden[:, 0] % NUM_TOKENS
        return torch.nn.functional.one_hot(chosen, FIRST_TOKEN + NUM_TOKENS).float()


def _queries(state: Tensor, layer: int) -> Tensor:
    component = _mixed(state[:, None], layer, torch.arange(HEADS)) % DIM
    return (component[..., None] == _DIMS).float() / _SCALE


def _keys_values(state: Tensor, positions: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    numbers = _mixed(state[:, None, None], layer, torch.arange(KV_HEADS)[:, None], _DIMS)
    is_first = (positions == 0)[:, None, None]
    keys = torch.where(is_first, 0, numbers >> 40 & 1).float() * math.log(2)
    values = (numbers >> 20) % 15 - 7
    return keys, torch.where(_DIMS == 0, is_first.long(), values).float()


def _next_state(state: Tensor, out: Tensor) -> Tensor:
    sums = torch.nan_to_num(out[..., 1:] / out[..., :1], posinf=1e6, neginf=-1e6)
    factors = _mixed(torch.arange(HEADS)[:, None], torch.arange(DIM - 1))
    found = (sums.clamp(-1e6, 1e6).round().long() * factors).sum((1, 2))
    return _mixed(state, found)


def _recurrent(state: Tensor, records: LayerState) -> Tensor:
    """Mixes a number into each row that depends on it and on all rows before."""
    numbers = (state % _MODULUS).tolist()
    segments = records.segments
    firsts = segments.firsts.tolist()
    pairs = zip(segments.sources.tolist(), segments.targets.tolist(), strict=True)
    for (first, end), (source, target) in zip(pairwise(firsts), pairs, strict=True):
        number = 0 if source == NO_RECORD else int(records.conv[source, 0, 0])
        for row in range(first, end):
            numbers[row] = number = (31 * number + numbers[row] + 7) % _MODULUS
        records.conv[target] = number
    return _mixed(state, torch.tensor(numbers))


class _Dense:
    """Attention for one sequence, in fp64, with its K/V in plain tensors. states: those of the rows
    that are computed next."""

    def __init__(self) -> None:
        self.states = RecordStates([], _whole(0, 0))
        self._records = [LayerRecords(torch.zeros(1, 1, 1), None, torch.zeros(1, 0, 1))]
        empty = torch.zeros(0, HEADS, DIM, dtype=torch.float64)
        self._past = [(empty, empty)] * NUM_LAYERS

    def begin_rows(self, position: int, num_rows: int) -> None:
        self.states = RecordStates(self._records, _whole(position, num_rows))

    def begin(self, layer, q):
        return layer, q

    def finish(self, ticket, k, v, rotation):
        layer, q = ticket
        first = len(self._past[layer][0])
        keys, values = (
            torch.cat([past, new.double()[:, _KV_HEAD_OF]])
            for past, new in zip(self._past[layer], (k, v), strict=True)
        )
        self._past[layer] = keys, values
        scores = torch.einsum("nhd,mhd->hnm", q.double() * _SCALE, keys)
        hidden = torch.arange(len(keys)) > first + torch.arange(len(q))[:, None]
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        self._out = torch.einsum("hnm,mhd->nhd", weights, values)
        return self

    def wait(self):
        return self._out


def _whole(position: int, num_rows: int) -> StateSegments:
    """Returns rows of one sequence as one segment."""
    source = 0 if position else NO_RECORD
    return StateSegments(*map(torch.tensor, ([0, num_rows], [source], [0], [0, 1])))


@torch.inference_mode()
def expected_tokens(prompt: list[int], count: int, has_states: bool = False) -> list[int]:
    """Returns what follows the prompt, computed with the model alone."""
    model, attention = ExactModel(has_states), _Dense()
    rows, position = list(prompt), 0
    found: list[int] = []
    while len(found) < count:
        positions = torch.arange(position, position + len(rows))
        attention.begin_rows(position, len(rows))
        hidden = model.forward(torch.tensor(rows), positions, attention)
        position += len(rows)
        rows = [int(model.logits(hidden[-1:]).argmax())]
        found += rows
    return found
