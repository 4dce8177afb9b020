"""Attention over bf16 and fp32 K/V on the native kernels (ops/csrc/attention_plain*.inl).

K/V may have any token and head stride.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.backend import KeyValues, Partial
from ops.cpu.native_library import BEGIN, FINISH, TYPES, address, library


def can_attend(q: Tensor, cache: KeyValues) -> bool:
    """Returns whether the kernels support these heads and this type of K/V."""
    k, v = cache
    dim = q.shape[2]
    is_dense = q.stride()[1:] == (dim, 1) and k.stride() == v.stride() and k.stride(3) == 1
    has_types = k.dtype == v.dtype and k.dtype in TYPES and q.dtype in TYPES
    has_dim = dim % 16 == 0 and dim <= library().MAX_PLAIN_DIM
    return has_dim and is_dense and has_types


def begin_decode(
    q: Tensor, caches: Sequence[KeyValues], scale: float, *, soft_cap: float = 0.0
) -> Tensor:
    """Computes Backend.begin_decode over bf16 or fp32 K/V."""
    rows, heads, dim = q.shape
    sums = torch.empty(rows, 2, heads, dim + 2)
    _decode(q, caches, scale, 0, 0, soft_cap, 0, BEGIN, sums.data_ptr())
    return sums


def decode_attention(
    q: Tensor,
    caches: Sequence[KeyValues],
    scale: float,
    begun: Tensor | None = None,
    *,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Partial:
    """Computes Backend.decode_attention over bf16 or fp32 K/V."""
    out = torch.empty(q.shape, dtype=torch.float32)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    phase = () if begun is None else (FINISH, begun.data_ptr())
    changes = soft_cap, _address_of(sinks, q.shape[1])
    _decode(q, caches, scale, out.data_ptr(), lse.data_ptr(), *changes, *phase)
    return Partial(out.to(q.dtype), lse)


def _address_of(sinks: Tensor | None, num_heads: int) -> int:
    if sinks is not None:
        assert sinks.shape == (num_heads,) and sinks.dtype == torch.float32, f"{sinks.shape}"
        assert sinks.is_contiguous()
    return address(sinks)


def _decode(
    q: Tensor,
    caches: Sequence[KeyValues],
    scale: float,
    out: int,
    lse: int,
    soft_cap: float,
    sinks: int,
    *phase: int,
) -> None:
    """phase: none for one call; else its number and the address of the sums."""
    rows, heads, dim = q.shape
    assert len(caches) == rows, f"{len(caches)} sequences, {rows} rows"
    sequences: list[int] = []
    shape = (1, caches[0].k.shape[1], dim) if rows else ()
    for k, v in caches:
        assert k.shape == v.shape and (k.shape[0], k.shape[1], k.shape[3]) == shape, f"{k.shape}"
        assert heads % k.shape[1] == 0 and k.dtype == caches[0].k.dtype
        sequences += (k.data_ptr(), v.data_ptr(), k.stride(2), k.stride(1), k.shape[2])
    if rows:
        first = caches[0].k
        library().decode_plain(
            sequences,
            heads,
            first.shape[1],
            dim,
            scale,
            TYPES[first.dtype],
            q.data_ptr(),
            q.stride(0),
            TYPES[q.dtype],
            out,
            lse,
            soft_cap,
            sinks,
            *phase,
        )


def prefill_attention(
    q: Tensor,
    cache: KeyValues,
    scale: float,
    window: int | None,
    *,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Partial:
    """Computes Backend.prefill_attention. A row's bits do not depend on the other rows.

    This holds if the cache begins at the same position for every call: the kernel takes its keys
    in blocks from there and skips blocks that no row sees.
    """
    first_position = cache.k.shape[2] - len(q)
    assert first_position >= 0, f"{q.shape} with {cache.k.shape}"
    changes = soft_cap, _address_of(sinks, q.shape[1])
    return _attend_rows(q, cache, scale, window, first_position, *changes)


def prefix_attention(
    q: Tensor, cache: KeyValues, scale: float, window: int | None, *, soft_cap: float = 0.0
) -> Partial:
    """Computes Backend.prefix_attention, with the bits of prefill_attention's rule."""
    return _attend_rows(q, cache, scale, window, cache.k.shape[2], soft_cap, 0)


def _attend_rows(
    q: Tensor,
    cache: KeyValues,
    scale: float,
    window: int | None,
    first_position: int,
    soft_cap: float,
    sinks: int,
) -> Partial:
    """Computes attention of rows from first_position on; the cache begins at position 0."""
    rows, heads, dim = q.shape
    k, v = cache
    assert k.shape == v.shape and (k.shape[0], k.shape[3]) == (1, dim), f"{k.shape} {v.shape}"
    assert heads % k.shape[1] == 0, f"{q.shape} with {k.shape}"
    assert window is None or window > 0, f"{window=}"
    out = torch.empty(rows, heads, dim, dtype=q.dtype)
    lse = torch.empty(rows, heads, dtype=torch.float32)
    if rows:
        library().prefill_plain(
            k.data_ptr(),
            v.data_ptr(),
            k.stride(2),
            k.stride(1),
            k.shape[2],
            heads,
            k.shape[1],
            dim,
            scale,
            TYPES[k.dtype],
            q.data_ptr(),
            q.stride(0),
            TYPES[q.dtype],
            rows,
            first_position,
            window or 0,
            out.data_ptr(),
            lse.data_ptr(),
            soft_cap,
            sinks,
        )
    return Partial(out, lse)
