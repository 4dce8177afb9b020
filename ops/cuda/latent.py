"""Latent attention on a CUDA device, on the work lists of ops.cuda.attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.cuda.attention import PrefillChunk, Rotation, StepArrays
from ops.triton_kernels import latent as kernels
from ops.triton_kernels.decode import combine
from ops.triton_kernels.latent_tiles import LatentTiles, append

__all__ = ["CudaLatentLayer", "LatentTiles"]


class CudaLatentLayer:
    """One layer's latents in the tiles at base. Rows are in the order of StepArrays.

    The result of a row does not depend on other rows, nor on the chunks of its prompt.
    """

    def __init__(self, tiles: LatentTiles, base: int) -> None:
        self.tiles, self.base = tiles, base

    def append(self, arrays: StepArrays, k: Tensor, rotation: Rotation | None = None) -> None:
        """Stores k: [T, 1, D] of all rows, of which V is a part. A rotation, [T, R/2] each, is
        applied to the values after value_dim first."""
        append(self.tiles, self.base, k, arrays.rows, rotation)

    def attend(
        self,
        arrays: StepArrays,
        q: Tensor,
        num_decodes_padded: int,
        num_rows_padded: int,
        has_prefill: bool,
        prompts: Sequence[PrefillChunk] = (),
        lse: Tensor | None = None,
    ) -> Tensor:
        """Returns attention [T, H, value_dim] for q: [T, H, D]; padding rows are undefined.

        The latents of all rows must be appended. No library computes prompts of latents. lse: as in
        CudaAttentionLayer.
        """
        assert not prompts, f"{prompts}"
        tiles, base = self.tiles, self.base
        dtype = q.dtype if lse is None else torch.float32
        out = torch.empty(*q.shape[:2], tiles.value_dim, dtype=dtype, device=q.device)
        if num_decodes_padded:
            index = arrays.window_index(None)
            outs, lses = arrays.scratch(tiles.num_heads, tiles.value_dim)
            decodes = q[:num_decodes_padded]
            work = arrays.starts, arrays.items[index], arrays.num_items[index], outs, lses
            kernels.decode(decodes, tiles, base, *work, arrays.num_programs)
            of_rows = None if lse is None else lse[:num_decodes_padded]
            combine(outs, lses, arrays.slots[index], out[:num_decodes_padded], of_rows)
        if has_prefill:
            rows = kernels.tile_rows(tiles.num_heads)
            kind = arrays.tile_index(rows)
            max_tiles = num_rows_padded // rows + min(num_rows_padded, arrays.max_seqs)
            kernels.prefill(
                q,
                tiles,
                base,
                arrays.prompt_starts,
                arrays.prompts,
                arrays.tiles[kind],
                arrays.num_tiles[kind],
                max_tiles,
                out,
                lse,
            )
        return out
