"""Attention of long prefill chunks with the fastest installed library kernel.

A chunk's keys and values are first gathered from the tiles to dense bf16 tensors. This moves a few
bytes per key, while attention costs 4 * D operations per key and row. Lengths differ from chunk to
chunk, so CUDA graphs do not include these calls.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.cuda.attention import CudaAttentionLayer, HeadShape, PrefillChunk, StepArrays
from ops.kv_tiles import TILE_TOKENS, KVTiles, layer_bytes
from ops.triton_kernels.kv import gather

logger = logging.getLogger(__name__)

# Maps q: [n, H, D], the last n of the L positions of k, v: [L, Hk, D], scale, window to [n, H, D].
Attend = Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]


class Candidate(NamedTuple):
    name: str
    attend: Attend
    has_windows: bool


def of_flashinfer(module: Any) -> Attend:
    """Wraps flashinfer.single_prefill_with_kv_cache.

    Its causal mask ends at the last key; a left window counts the keys before the row's own.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        left = -1 if window is None else window - 1
        out: Tensor = module.single_prefill_with_kv_cache(
            q, k, v, causal=True, kv_layout="NHD", sm_scale=scale, window_left=left
        )
        return out

    return attend


def of_flash_attn(function: Any) -> Attend:
    """Wraps flash_attn_func of FlashAttention 2 (2.1 or later) and 3.

    Its causal mask ends at the last key.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        limits = (-1, -1) if window is None else (window - 1, 0)
        found = function(
            q[None], k[None], v[None], softmax_scale=scale, causal=True, window_size=limits
        )
        # Some releases of version 3 return the log-sum-exp as well.
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.reshape(q.shape)

    return attend


def of_torch_flash(op: Any) -> Attend:
    """Wraps aten._scaled_dot_product_flash_attention, whose causal mask ends at the last key."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        assert window is None, f"{window=}"
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out: Tensor = op(q, k, v, 0.0, True, False, scale=scale)[0]
        return out[0].transpose(0, 1)

    return attend


def of_cudnn(op: Any) -> Attend:
    """Wraps aten._scaled_dot_product_cudnn_attention, whose causal mask begins at the first key.

    The rows' own keys are masked, the prefix is not; their log-sum-exp (natural, [1, H, n, 1])
    merges them.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        assert window is None, f"{window=}"
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        past = k.shape[2] - q.shape[2]
        own = k[:, :, past:], v[:, :, past:]
        out, lse = op(q, *own, None, True, 0.0, True, False, scale=scale)[:2]
        if past:
            before = k[:, :, :past], v[:, :, :past]
            other, of_other = op(q, *before, None, True, 0.0, False, False, scale=scale)[:2]
            share = torch.sigmoid((of_other - lse).reshape(*q.shape[:3], 1))
            out = torch.lerp(out.float(), other.float(), share).to(q.dtype)
        result: Tensor = out[0].transpose(0, 1)
        return result

    return attend


def installed(find: Callable[[str], Any] = importlib.import_module) -> list[Candidate]:
    """Returns the kernels that can be imported, with the best guess first."""
    found = []
    for name, wrap in (("flash_attn_interface", of_flash_attn), ("flash_attn", of_flash_attn)):
        try:
            found.append(Candidate(name, wrap(find(name).flash_attn_func), has_windows=True))
        except (ImportError, OSError, AttributeError) as error:
            logger.debug("no %s: %s", name, error)
    try:
        module = find("flashinfer")
        found.insert(1, Candidate("flashinfer", of_flashinfer(module), has_windows=True))
    except (ImportError, OSError) as error:
        logger.debug("no flashinfer: %s", error)
    aten = torch.ops.aten
    flash = of_torch_flash(aten._scaled_dot_product_flash_attention)
    cudnn = of_cudnn(aten._scaled_dot_product_cudnn_attention)
    found.append(Candidate("torch flash", flash, has_windows=False))
    found.append(Candidate("cudnn", cudnn, has_windows=False))
    return found


class LibraryPrefill:
    """The chosen kernel for each shape of heads.

    min_rows: shorter chunks use our own kernel, which computes all of them in one launch.
    """

    def __init__(
        self, candidates: Sequence[Candidate], device: torch.device | str, min_rows: int = 256
    ) -> None:
        self.candidates, self.device, self.min_rows = list(candidates), device, min_rows
        self._chosen: dict[tuple[int, int, int, bool], Candidate] = {}

    def prepare(
        self,
        layers: Sequence[KVTiles],
        own: Attend | None = None,
        measure: Callable[[Attend, KVTiles], float] | None = None,
    ) -> bool:
        """Chooses the fastest candidate that agrees with own (None: our kernel) for each layer.

        Returns False if a layer has none; then `attend` must not be called.
        """
        own = own or own_attention
        measure = measure or seconds
        for tiles in layers:
            key = _key(tiles)
            if key in self._chosen:
                continue
            passed = [c for c in self.candidates if self._is_right(c, tiles, own)]
            if not passed:
                logger.info("prompt attention %s: our own kernel", key)
                return False
            taken = [measure(candidate.attend, tiles) for candidate in passed]
            best = min(range(len(taken)), key=taken.__getitem__)
            self._chosen[key] = passed[best]
            pairs = zip(passed, taken, strict=True)
            timed = ", ".join(f"{c.name} {t * 1e3:.3f} ms" for c, t in pairs)
            logger.info("prompt attention %s: %s (%s)", key, passed[best].name, timed)
        return True

    def attend(
        self, tiles: KVTiles, base: int, prompt: PrefillChunk, q: Tensor, out: Tensor
    ) -> None:
        """Computes attention of a chunk's rows of q: [T, H, D] into the same rows of out."""
        shape = (prompt.kv_len, tiles.num_kv_heads, tiles.head_dim)
        k, v = (torch.empty(shape, dtype=torch.bfloat16, device=q.device) for _ in range(2))
        gather(tiles, base, prompt.start, k, v)
        rows = slice(prompt.first_row, prompt.first_row + prompt.num_rows)
        attend = self._chosen[_key(tiles)].attend
        out[rows] = attend(q[rows].contiguous(), k, v, tiles.scale, tiles.window)

    def _is_right(self, candidate: Candidate, tiles: KVTiles, own: Attend) -> bool:
        """Returns whether a candidate agrees with own on cases that show a shifted mask."""
        if tiles.window is not None and not candidate.has_windows:
            return False
        if tiles.soft_cap:
            return False  # our own kernel caps scores
        window = None if tiles.window is None else min(tiles.window, 50)
        for rows, length in ((64, 64), (100, 170), (1, 33)):
            q, k, v = _random(tiles, rows, length, self.device)
            expected = own(3 * q, k, v, tiles.scale, window).float()
            try:
                found = candidate.attend(3 * q, k, v, tiles.scale, window).float()
                error = float((found - expected).abs().max())
            except Exception as failure:  # libraries raise anything
                logger.warning("prompt attention: %s fails: %s", candidate.name, failure)
                return False
            if not error <= 0.03 * float(expected.abs().max()):
                logger.warning("prompt attention: %s is off by %g", candidate.name, error)
                return False
        return True


def own_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Computes the same with our own kernel, over temporary tiles."""
    (rows, heads, dim), (length, kv_heads) = q.shape, k.shape[:2]
    size = layer_bytes(kv_heads, dim, torch.bfloat16, None)
    memory = torch.empty(-(-length // TILE_TOKENS) * size, dtype=torch.uint8, device=q.device)
    tiles = KVTiles(heads, kv_heads, dim, scale, window, torch.bfloat16, None, size, 0)
    layer = CudaAttentionLayer(tiles, memory.data_ptr())
    arrays = StepArrays(length, 1, length, [HeadShape(heads, kv_heads, dim)], q.device, [window])
    host = torch.zeros(arrays.num_words, dtype=torch.int32)
    for new in (length, rows):
        arrays.fill(host, [0], [new], [length], 0, new, 0)
        arrays.upload(host)
        if new == length:
            layer.append(arrays, k, v)
    return layer.attend(arrays, q, 0, rows, True)


def seconds(attend: Attend, tiles: KVTiles) -> float:
    """Returns the time of a chunk of 2,048 rows with as many before; 0 without a GPU.

    Each run has a new length, because some libraries make a plan for every new one.
    """
    if not torch.cuda.is_available():
        return 0.0
    taken = []
    for i in range(4):
        q, k, v = _random(tiles, 2048 + 16 * i, 4096 + 48 * i, "cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        attend(q, k, v, tiles.scale, tiles.window)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return sum(taken[1:]) / 3


def _random(
    tiles: KVTiles, rows: int, length: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    heads = (tiles.num_heads, tiles.num_kv_heads, tiles.num_kv_heads)
    q, k, v = (
        torch.randn(n, h, tiles.head_dim, generator=generator).to(device, torch.bfloat16)
        for n, h in zip((rows, length, length), heads, strict=True)
    )
    return q, k, v


def _key(tiles: KVTiles) -> tuple[int, int, int, bool]:
    return tiles.num_heads, tiles.num_kv_heads, tiles.head_dim, tiles.window is not None
