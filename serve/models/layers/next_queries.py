"""Tells attention about what the next layer's queries will be, while this layer is computed.

What a block adds to the hidden state is small beside it, so that the next block's norm, product and
rotation give much the same queries for the input of this block's MLP as for its result. Attention
that fetches K/V begins with what such queries select (InfiniGen, arXiv 2406.19707, guesses by the
block's input and a part of the product).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from memory.attention.seam import Attention, ExpectsQueries
from serve.models.layers.blocks import AttentionWeights, Block, RowInputs


def foretelling(
    blocks: Sequence[Block],
    kv_numbers: Sequence[int],
    inputs: RowInputs,
    attention: Attention,
    first_layer: int = 0,
) -> Callable[[int, Tensor], None] | None:
    """Returns what tells attention the next block's queries, by a block's number and the input of
    its MLP. None if attention does not ask for them. kv_numbers: of each block, its layer of
    attention; first_layer: the first block's number."""
    if not isinstance(attention, ExpectsQueries) or not (rows := attention.num_expected()):
        return None
    if rows < len(inputs.positions):
        rotations = [(cos[:rows], sin[:rows]) for cos, sin in inputs.rotations]
        inputs = RowInputs(rotations, inputs.positions[:rows])

    def foretell(number: int, x: Tensor) -> None:
        following = number - first_layer + 1
        half = blocks[following].attention if following < len(blocks) else None
        if isinstance(half, AttentionWeights):
            q, _ = half.queries(x[:rows], inputs)
            attention.expect(kv_numbers[following], q)

    return foretell
