"""Rows of q, k, v and partial results in messages: fp32, bf16, or int8.

In int8, q and out are bytes followed by an fp32 scale for each row and head; k and v are then bf16,
because int8 K/V has scales of its own. Log-sum-exps are always fp32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from memory.attention.seam import AttentionLayer
from memory.nodes.wire import (
    FULL_WIRE,
    HEADER_BYTES,
    ErrorCode,
    Header,
    WireError,
    WireFormat,
    WireType,
)
from ops.cpu.native_partials import dequantize_heads, quantize_heads

_FLOATS = {WireType.FLOAT32: torch.float32, WireType.BFLOAT16: torch.bfloat16}
_SCALE_BYTES = 4


def kv_type(dtype: WireType) -> WireType:
    """Returns the type of k and v for this type of q and out, unless more bits are kept."""
    return WireType.BFLOAT16 if dtype is WireType.INT8 else dtype


def fits_int8(head_dim: int) -> bool:
    """Returns whether q and out with this head_dim can be sent in int8."""
    return head_dim % 16 == 0


def float_type(dtype: WireType) -> torch.dtype:
    return _FLOATS[kv_type(dtype)]


def encode(x: Tensor, dtype: WireType) -> list[Tensor]:
    """Encodes x, [R, H, D] with dense heads; returns the tensors to send, in order."""
    if dtype is WireType.INT8:
        return list(quantize_heads(x))
    return [x if x.dtype == _FLOATS[dtype] else x.to(_FLOATS[dtype])]


class WireRows:
    """Sizes and decoding of one layer's rows."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int | None = None
    ) -> None:
        """value_dim: as in AttentionLayer. With it, v is not sent, and out is [R, H, value_dim]."""
        self._heads = num_heads
        self._kv_heads = num_kv_heads
        self._dim = head_dim
        self._out_dim = head_dim if value_dim is None else value_dim
        self._has_v = value_dim is None

    @classmethod
    def of(cls, layer: AttentionLayer) -> WireRows:
        return cls(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim)

    @property
    def num_heads(self) -> int:
        return self._heads

    def q_bytes(self, rows: int, dtype: WireType) -> int:
        """Returns the bytes of q, [rows, H, D]."""
        return self._row_bytes(rows, self._dim, dtype)

    def out_bytes(self, rows: int, dtype: WireType) -> int:
        """Returns the bytes of out, [rows, H, D], or [rows, H, value_dim]."""
        return self._row_bytes(rows, self._out_dim, dtype)

    def _row_bytes(self, rows: int, dim: int, dtype: WireType) -> int:
        if dtype is WireType.INT8:
            return rows * self._heads * (dim + _SCALE_BYTES)
        return rows * self._heads * dim * _FLOATS[dtype].itemsize

    def partial_bytes(self, rows: int, dtype: WireType) -> int:
        return self.out_bytes(rows, dtype) + rows * self._heads * 4

    def kv_bytes(self, rows: int, dtype: WireType) -> int:
        """Returns the bytes of k and v together, [rows, Hk, D] each, or of k alone."""
        parts = 2 if self._has_v else 1
        return parts * rows * self._kv_heads * self._dim * float_type(dtype).itemsize

    def largest(self, rows: int, wire: WireFormat = FULL_WIRE) -> int:
        """Returns the bytes of the largest message with so many rows, without its header."""
        sizes = self.q_bytes(rows, wire.rows), self.partial_bytes(rows, wire.rows)
        return max(*sizes, self.kv_bytes(rows, wire.kv))

    def read_q(self, body: memoryview, header: Header) -> Tensor:
        """Returns q [R, H, D], a view of the message unless it is int8. Raises WireError for a
        wrong size."""
        expect(len(body), self.q_bytes(header.rows, header.dtype), header)
        return self._decode(body, header.rows, self._dim, header.dtype)

    def _decode(self, body: memoryview, rows: int, dim: int, dtype: WireType) -> Tensor:
        shape = (rows, self._heads, dim)
        if dtype is not WireType.INT8:
            return torch.frombuffer(body, dtype=_FLOATS[dtype]).view(shape)
        if not fits_int8(dim):
            raise WireError(ErrorCode.SHAPE, f"heads of {dim} in 8 bits")
        count = rows * self._heads * dim
        values = torch.frombuffer(body[:count], dtype=torch.int8).view(shape)
        scales = torch.frombuffer(body[count:], dtype=torch.float32).view(shape[:2])
        return dequantize_heads(values, scales)

    def check_kv(self, num_bytes: int, header: Header) -> None:
        """Raises WireError for a wrong size."""
        expect(num_bytes, self.kv_bytes(header.rows, header.dtype), header)

    def read_kv(self, body: memoryview, header: Header) -> tuple[Tensor, Tensor | None]:
        """Returns k and v, [R, Hk, D] each, as views of the message, or k and None. Raises
        WireError for a wrong size."""
        self.check_kv(len(body), header)
        all_rows = torch.frombuffer(body, dtype=float_type(header.dtype))
        k, *rest = all_rows.view(-1, header.rows, self._kv_heads, self._dim).unbind(0)
        return k, rest[0] if rest else None

    def read_result(self, body: memoryview, header: Header) -> Tensor:
        """Returns out [R, H, D], a view of the message unless it is int8. Raises WireError for a
        wrong size."""
        expect(len(body), self.out_bytes(header.rows, header.dtype), header)
        return self._decode(body, header.rows, self._out_dim, header.dtype)

    def read_partial(self, body: memoryview, header: Header) -> tuple[Tensor, Tensor]:
        """Returns out [R, H, D] and lse [R, H] fp32; lse is a view of the message, out too unless
        it is int8. Raises WireError for a wrong size."""
        expect(len(body), self.partial_bytes(header.rows, header.dtype), header)
        end = self.out_bytes(header.rows, header.dtype)
        lse = torch.frombuffer(body[end:], dtype=torch.float32).view(header.rows, self._heads)
        return self._decode(body[:end], header.rows, self._out_dim, header.dtype), lse


def largest_message(layers: Iterable[AttentionLayer], max_rows: int, wire: WireFormat) -> int:
    """Returns the bytes of the largest message for so many rows, header included."""
    rows = [WireRows.of(layer) for layer in layers]
    return HEADER_BYTES + max(item.largest(max_rows, wire) for item in rows)


def expect(num_bytes: int, due: int, header: Header) -> None:
    if num_bytes != due:
        kind, rows = header.kind.name, header.rows
        raise WireError(ErrorCode.SHAPE, f"{kind} of {rows} rows has {num_bytes} bytes, not {due}")
