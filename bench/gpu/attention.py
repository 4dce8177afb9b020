"""Attention over the engine's K/V tiles, and libraries' attention over contiguous bf16 K/V.

A tile holds several layers, as in the engine, and the layers take turns, so that every call reads
its K/V from memory. A query head and a key that it attends to count as 4 x head_dim operations.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu.record import Figures, Record
from bench.gpu.timing import Timing, device, time_works

_LAYERS = 16  # layers of a tile
_FILL_ROWS = 32768
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Heads:
    """The numbers of query and K/V heads, and the values of a head."""

    query: int = 32
    kv: int = 8
    dim: int = 128


EIGHT_B, TINY = Heads(), Heads(4, 2, 32)


def run(record: Record) -> None:
    heads, layers = (TINY, 1) if record.is_dry else (EIGHT_B, _LAYERS)
    shapes = [(64, 4096), (64, 1024), (1, 1024), (16, 4096), (1, 32768), (16, 32768)]
    if record.is_dry:
        shapes = [(2, 40)]
    length = 24 if record.is_dry else 8192

    def decodes(kind: str, which: list[tuple[int, int]], group: int = 64) -> None:
        for batch, context in which:
            name = f"decode {kind} {batch} x {context}" + (f" group {group}" * (group != 64))
            made = partial(decode, heads, batch, context, kind, group, layers)
            record.run(name, made)

    decodes("int8", shapes[:1])
    for name, rival in decode_rivals().items():
        batch, context = shapes[0]
        record.run(
            f"rival decode {batch} x {context} {name}", partial(rival, heads, batch, context)
        )
    record.run(f"prefill {length} own bf16", partial(prefill, heads, length, "bf16"))
    record.run(f"prefill {length} own int8", partial(prefill, heads, length, "int8"))
    for kind in ("bf16", "int8") if not record.is_dry else ():  # its own check needs long prompts
        made = partial(library_prefill, heads, length, kind)
        record.run(f"prefill {length} library {kind}", made)
    for candidate in _candidates():
        made = partial(_dense_prefill, candidate.attend, heads, length)
        record.run(f"dense prefill {length} {candidate.name}", made)
    decodes("bf16", shapes[:1])
    decodes("int8", shapes[:1], 128)
    decodes("int8", shapes[1:])
    decodes("bf16", shapes[1:3])


# ---- our kernels


@dataclass
class Step:
    """One step's rows over the K/V of some layers. attend: a call for each layer. layer_bytes: K/V
    of one token in one layer, scales included. tiles, k, v: those of the last layer."""

    attend: list[Callable[[], Tensor]]
    layer_bytes: int
    memory: Tensor
    """Keeps the K/V alive, since the calls have only its address."""
    tiles: Any
    q: Tensor
    """[T, H, D]"""
    k: Tensor
    """[tokens, Hk, D], range after range"""
    v: Tensor


def make_step(
    heads: Heads,
    num_rows: list[int],
    kv_lens: list[int],
    kind: str,
    *,
    group: int = 64,
    layers: int = 1,
    window: int | None = None,
) -> Step:
    """Makes a step; sequences with one row decode and come first."""
    from ops.cuda.attention import CudaAttentionLayer, HeadShape, KVTiles, StepArrays, layer_bytes
    from ops.triton_kernels.kv import append

    tile_tokens = 16
    dtype = torch.int8 if kind == "int8" else torch.bfloat16
    scale_group = min(group, heads.dim) if kind == "int8" else None
    size = layer_bytes(heads.kv, heads.dim, dtype, scale_group)
    tiles_of = [-(-length // tile_tokens) for length in kv_lens]
    starts = [tile_tokens * sum(tiles_of[:i]) for i in range(len(tiles_of))]
    num_tokens = tile_tokens * sum(tiles_of)
    memory = torch.zeros(sum(tiles_of) * layers * size, dtype=torch.uint8, device=device())
    total, num_decodes = sum(num_rows), sum(rows == 1 for rows in num_rows)
    arrays = StepArrays(
        max_rows=max(total, 1),
        max_seqs=len(kv_lens),
        max_len=max(kv_lens),
        shapes=[HeadShape(heads.query, heads.kv, heads.dim)],
        device=device(),
        windows=(window,),
    )
    host = torch.zeros(arrays.num_words, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    arrays.fill(host, starts, num_rows, kv_lens, num_decodes, total, num_decodes)
    arrays.upload(host)
    q = torch.randn(total, heads.query, heads.dim, device=device(), dtype=torch.bfloat16)
    calls: list[Callable[[], Tensor]] = []
    k = v = q
    tiles: Any = None
    for number in range(layers):
        k, v = (
            torch.randn(num_tokens, heads.kv, heads.dim, device=device(), dtype=torch.bfloat16)
            for _ in range(2)
        )
        tiles = KVTiles(
            heads.query, heads.kv, heads.dim, heads.dim**-0.5, window, dtype, scale_group,
            layers * size, number * size,
        )  # fmt: skip
        layer = CudaAttentionLayer(tiles, memory.data_ptr())
        for first in range(0, num_tokens, _FILL_ROWS):
            end = min(first + _FILL_ROWS, num_tokens)
            rows = torch.arange(first, end, device=device())
            append(tiles, memory.data_ptr(), k[first:end], v[first:end], rows)
        has_prompts = num_decodes < len(num_rows)
        calls.append(partial(layer.attend, arrays, q, num_decodes, total, has_prompts))
    return Step(calls, size // tile_tokens, memory, tiles, q, k, v)


def decode(heads: Heads, batch: int, context: int, kind: str, group: int, layers: int) -> Figures:
    step = make_step(heads, [1] * batch, [context] * batch, kind, group=group, layers=layers)
    timing = time_works(step.attend)
    moved = batch * context * step.layer_bytes + 4 * step.q.numel()
    return timing.figures(bytes=moved, operations=_decode_operations(heads, batch, context))


def prefill(heads: Heads, length: int, kind: str) -> Figures:
    step = make_step(heads, [length], [length], kind)
    return _prefill_figures(time_works(step.attend), heads, length, step)


def library_prefill(heads: Heads, length: int, kind: str) -> Figures:
    """Times a long chunk as the engine computes it with a library, after gathering the tiles."""
    from ops.cuda.attention import PrefillChunk
    from ops.cuda.prefill import LibraryPrefill

    step = make_step(heads, [length], [length], kind)
    library = LibraryPrefill(list(_candidates()), device())
    if not library.prepare([step.tiles]):
        raise RuntimeError("no library's attention passes its check on this device")
    out, prompt = torch.empty_like(step.q), PrefillChunk(0, 0, length, length)
    call = partial(library.attend, step.tiles, step.memory.data_ptr(), prompt, step.q, out)
    chosen = ", ".join(candidate.name for candidate in library._chosen.values())
    return _prefill_figures(time_works([call]), heads, length, step) | {"chosen": chosen}


def _prefill_figures(timing: Timing, heads: Heads, length: int, step: Step) -> Figures:
    moved = length * step.layer_bytes + 4 * step.q.numel()
    operations = _prefill_operations(heads, length)
    return timing.figures(bytes=moved, operations=operations, unit="bf16")


def _candidates() -> list[Any]:
    """Returns the candidates of ops/cuda/prefill.py, of which only our own kernel runs without a
    GPU."""
    from ops.cuda.prefill import Candidate, installed, own_attention

    if torch.cuda.is_available():
        return list(installed())
    return [Candidate("own", own_attention, True)]


def _decode_operations(heads: Heads, batch: int, context: int) -> float:
    return 4.0 * heads.query * heads.dim * batch * context


def _prefill_operations(heads: Heads, length: int) -> float:
    return 4.0 * heads.query * heads.dim * length * (length + 1) / 2


# ---- libraries


def _contiguous(heads: Heads, batch: int, length: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random q: [B, H, rows, D] and k, v: [B, Hk, length, D] in bf16."""
    kind: dict[str, Any] = {"device": device(), "dtype": torch.bfloat16}
    q = torch.randn(batch, heads.query, rows, heads.dim, **kind)
    k, v = (torch.randn(batch, heads.kv, length, heads.dim, **kind) for _ in range(2))
    return q, k, v


Rival = Callable[[Heads, int, int], Figures]


def decode_rivals() -> dict[str, Rival]:
    found: dict[str, Rival] = {}
    for name in _BACKENDS if torch.cuda.is_available() else ():
        found[f"sdpa {name}"] = partial(_sdpa_decode, name, False)
        found[f"sdpa {name}, groups as rows"] = partial(_sdpa_decode, name, True)
    if not torch.cuda.is_available():
        found["sdpa"] = partial(_sdpa_decode, None, False)
    if importlib.util.find_spec("flashinfer"):
        found["flashinfer"] = partial(_flashinfer_decode, False)
        found["flashinfer, tensor cores"] = partial(_flashinfer_decode, True)
    return found


def _sdpa_decode(
    backend: str | None, as_rows: bool, heads: Heads, batch: int, context: int
) -> Figures:
    """Times PyTorch's attention. as_rows: query heads of a K/V head are rows of one head."""
    q, k, v = _contiguous(heads, batch, context, 1)
    if as_rows:
        q = q.view(batch, heads.kv, heads.query // heads.kv, heads.dim)
    repeats = not as_rows and heads.query != heads.kv
    timing = _time_sdpa(backend, q, k, v, enable_gqa=repeats)
    moved = 2 * (k.numel() + v.numel() + 2 * q.numel())
    return timing.figures(bytes=moved, operations=_decode_operations(heads, batch, context))


def _time_sdpa(backend: str | None, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Timing:
    def attend() -> Tensor:
        return scaled_dot_product_attention(q, k, v, **options)

    if backend is None:
        return time_works([attend])
    with sdpa_kernel(_BACKENDS[backend]):
        return time_works([attend])


def _dense_prefill(attend: Callable[..., Tensor], heads: Heads, length: int) -> Figures:
    """Times attention of one prompt over contiguous bf16 K/V, [L, Hk, D]."""
    kind: dict[str, Any] = {"device": device(), "dtype": torch.bfloat16}
    q = torch.randn(length, heads.query, heads.dim, **kind)
    k, v = (torch.randn(length, heads.kv, heads.dim, **kind) for _ in range(2))
    timing = time_works([partial(attend, q, k, v, heads.dim**-0.5, None)])
    moved, operations = 4 * (q.numel() + k.numel()), _prefill_operations(heads, length)
    return timing.figures(bytes=moved, operations=operations, unit="bf16")


def _flashinfer_decode(tensor_cores: bool, heads: Heads, batch: int, context: int) -> Figures:
    flashinfer: Any = importlib.import_module("flashinfer")
    page = 16
    pages = batch * context // page
    shape = pages, page, heads.kv, heads.dim
    k, v = (torch.randn(shape, device=device(), dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, heads.query, heads.dim, device=device(), dtype=torch.bfloat16)
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device())
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=tensor_cores
    )
    counts: dict[str, Any] = {"dtype": torch.int32, "device": device()}
    wrapper.plan(
        torch.arange(0, pages + 1, context // page, **counts),
        torch.arange(pages, **counts),
        torch.full((batch,), page, **counts),
        heads.query, heads.kv, heads.dim, page,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    timing = time_works([partial(wrapper.run, q, (k, v))])
    moved = 2 * (k.numel() + v.numel() + 2 * q.numel())
    return timing.figures(bytes=moved, operations=_decode_operations(heads, batch, context))
