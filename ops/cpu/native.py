"""The native kernels (ops/csrc) as functions of tensors: shape checks, then calls by address.

This module has quantized linear layers with fused operations, and attention over int8 K/V. The
library uses the best instruction set of the processor (AVX-512 VNNI, AVX2, else portable code).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ops.backend import INT4_GROUPS, MAX_INT8_INPUTS, NO_FUSION, Fusion, Norm
from ops.linear import split_scales

try:
    from ops import _native
except ImportError as error:  # a source tree that was never built
    _native = None  # type: ignore[assignment]
    _why = str(error)

TYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}
NORMS = {"rms": 1, "layer": 2}


def is_available() -> bool:
    return _native is not None


def library() -> ModuleType:
    """Returns the compiled module. RuntimeError if it is not built."""
    if _native is None:
        raise RuntimeError(
            f"the native kernels are not built ({_why}); install the package with "
            "`pip install -e .`, which needs a C++ compiler"
        )
    return _native


def instruction_set() -> str:
    """Returns the kernels in use: avx512, avxvnni, avx2 or portable."""
    return str(library().instruction_set())


def num_threads() -> int:
    """Returns the size of the thread team, the caller included."""
    return int(library().num_threads())


def set_num_threads(n: int) -> None:
    """Sets the size of the thread team, at most the processors that this process may use."""
    library().set_num_threads(n)


class NativeLinear:
    """A LinearOp that fuses norm, int8 quantization, product, bias, activation and residual.

    Rows are fp32 or bf16 and are rounded to int8 with a scale per row. The result is fp32, or bf16
    after an activation, because the next layer quantizes it. A row's bits do not depend on other
    rows.
    """

    def __init__(self, op: Any, num_in: int, num_out: int, fusion: Fusion) -> None:
        """op: the library's packed product. num_out: number of outputs after gating."""
        self._op, self.num_in, self.num_out = op, num_in, num_out
        self._out_dtype = torch.float32 if fusion.activation is None else torch.bfloat16
        self._is_gated = fusion.is_gated
        self._norm = set_norm(op, fusion.norm, num_in)

    @property
    def size_bytes(self) -> int:
        return int(self._op.bytes)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        if residual is None:
            out = torch.empty(rows, self.num_out, dtype=self._out_dtype)
        else:
            out = residual
            assert out.shape == (rows, self.num_out) and out.dtype == torch.float32
            assert out.stride(1) == 1 and not self._is_gated, "a dense residual, no gates"
        assert x.shape[1] == self.num_in, f"{x.shape} times [{self.num_out}, {self.num_in}]"
        if x.stride(1) != 1:
            x = x.contiguous()
        if rows:
            self._op.run(
                x.data_ptr(),
                x.stride(0),
                TYPES[x.dtype],
                rows,
                out.data_ptr(),
                out.stride(0),
                TYPES[out.dtype],
                residual is not None,
            )
        return out

    def only_quantize(self, x: Tensor) -> None:
        """Runs norm and quantization without the product, for benchmarks."""
        self._op.only_quantize(x.data_ptr(), x.stride(0), TYPES[x.dtype], x.shape[0])


class Int8Linear(NativeLinear):
    """int8 x int8 with symmetric weights and a scale per output channel: QuantizedLinears.int8."""

    def __init__(
        self,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        scales: Tensor | None = None,
        is_head: bool = False,
    ) -> None:
        """Packs a copy of weight: [out, in], or of parts to be concatenated along the output.

        is_head has no effect: results are fp32.
        """
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        num_out, num_in = sizes(sum(len(part) for part in parts), parts[0].shape[1], fusion)
        if num_in > MAX_INT8_INPUTS:
            raise ValueError(f"{num_in:,} inputs: int8 products sum at most {MAX_INT8_INPUTS:,}")
        bias, kind = checked_bias(bias, num_out, fusion), ACTIVATIONS[fusion.activation]
        args: tuple[object, ...]
        if scales is not None:
            whole, scales = torch.cat(parts).contiguous(), scales.float().contiguous()
            assert whole.dtype == torch.int8 and scales.shape == whole.shape[:1]
            args = (whole.data_ptr(), scales.data_ptr())
        else:
            parts = _packable(parts)
            flat = [x for part in parts for x in (part.data_ptr(), part.stride(0), len(part))]
            args = (flat, TYPES[parts[0].dtype])
        op = library().Int8Linear(num_in, num_out, *args, address(bias), kind, fusion.is_gated)
        super().__init__(op, num_in, num_out, fusion)


def _packable(parts: list[Tensor]) -> list[Tensor]:
    """Returns at most MAX_PARTS parts of one type that the kernel supports, with dense rows."""
    if len(parts) > library().MAX_PARTS or any(part.dtype != parts[0].dtype for part in parts):
        parts = [torch.cat(parts)]
    if parts[0].dtype not in TYPES:
        parts = [part.float() for part in parts]
    return [part if part.stride(1) == 1 else part.contiguous() for part in parts]


class Int4Linear(NativeLinear):
    """4-bit weights with a scale and perhaps a zero point per group: QuantizedLinears.int4."""

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        group: int,
        is_nf4: bool = False,
    ) -> None:
        num_out, num_in = sizes(codes.shape[0], codes.shape[1], fusion)
        shape = (codes.shape[0], -(-num_in // group))
        assert group in INT4_GROUPS and codes.dtype == torch.uint8
        assert not (is_nf4 and zeros is not None)
        assert scales.shape == shape and (zeros is None or zeros.shape == shape), f"{scales.shape}"
        codes, bias = codes.contiguous(), checked_bias(bias, num_out, fusion)
        assert int(codes.max()) < 16, "codes of 4 bits"
        halves, channels = split_scales(scales)
        if is_nf4:  # the kernel's values are multiples of 1/127
            channels = channels / 127
        if zeros is not None:
            zeros = zeros.to(torch.uint8).contiguous()
        op = library().Int4Linear(
            num_in,
            num_out,
            codes.data_ptr(),
            halves.data_ptr(),
            address(zeros),
            channels.data_ptr(),
            group,
            is_nf4,
            address(bias),
            ACTIVATIONS[fusion.activation],
            fusion.is_gated,
        )
        super().__init__(op, num_in, num_out, fusion)


def set_norm(op: Any, norm: Norm | None, num_in: int) -> tuple[Tensor, Tensor | None] | None:
    """Passes the norm's addresses to op. The caller keeps the returned tensors, [num_in], alive."""
    if norm is None:
        return None
    weight = norm.weight.float().contiguous()
    bias = None if norm.bias is None else norm.bias.float().contiguous()
    assert weight.shape == (num_in,), f"{weight.shape} for {num_in} inputs"
    assert bias is None or bias.shape == (num_in,), f"{bias.shape} for {num_in} inputs"
    op.set_norm(NORMS[norm.kind], weight.data_ptr(), address(bias), norm.eps)
    return weight, bias


def sizes(rows: int, num_in: int, fusion: Fusion) -> tuple[int, int]:
    """Returns (outputs after gating, inputs)."""
    if not fusion.is_gated:
        return rows, num_in
    assert rows % 2 == 0 and fusion.activation is not None, "gates, as many factors, an activation"
    return rows // 2, num_in


def checked_bias(bias: Tensor | None, num_out: int, fusion: Fusion) -> Tensor | None:
    if bias is None:
        return None
    assert bias.shape == ((2 if fusion.is_gated else 1) * num_out,), f"{bias.shape} for {num_out}"
    return bias.float().contiguous()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Int8AttentionStep:
    """The sequences of one step over int8 K/V, shared by all layers."""

    def __init__(
        self,
        address: int,
        tile_bytes: int,
        starts: Sequence[int],
        num_rows: Sequence[int],
        kv_lens: Sequence[int],
        *,
        past_only: bool = False,
    ) -> None:
        """starts: byte offset of each range from address; num_rows, kv_lens: as in the seam.

        With past_only, kv_lens (perhaps 0) count the keys before the step. The rows attend to these
        keys only, and append writes after them.
        """
        assert len(starts) == len(num_rows) == len(kv_lens), "one of each for every sequence"
        counts = zip(num_rows, kv_lens, strict=True)
        assert all(n > 0 and length >= (0 if past_only else n) for n, length in counts)
        self.num_rows = sum(num_rows)
        self.plan: Any = library().StepPlan(
            address, tile_bytes, starts, num_rows, kv_lens, past_only
        )


class Int8Attention:
    """One layer over int8 K/V. append rotates, quantizes and stores; attend computes attention.

    window: keys a row sees, itself included; soft_cap: cap * tanh(score / cap); slopes: ALiBi, one
    per head; sinks: a logit per head that is added to the denominator only. A past_only step leaves
    sinks out, because they belong to the part with the row's own key.
    """

    def __init__(
        self,
        *,
        offset_bytes: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        group: int,
        scale: float,
        window: int | None = None,
        soft_cap: float = 0.0,
        slopes: Sequence[float] = (),
        sinks: Sequence[float] = (),
    ) -> None:
        assert head_dim % 16 == 0 and head_dim <= library().MAX_HEAD_DIM, f"{head_dim=}"
        assert group == 8 or group % 16 == 0, f"{group=}"
        assert head_dim % group == 0, f"{head_dim=} {group=}"
        assert num_heads % num_kv_heads == 0, f"{num_heads=} {num_kv_heads=}"
        assert len(slopes) in (0, num_heads) and len(sinks) in (0, num_heads), "one for each head"
        self._shape = (num_heads, num_kv_heads, head_dim)
        self._op: Any = library().Int8Attention(
            offset_bytes,
            num_heads,
            num_kv_heads,
            head_dim,
            group,
            scale,
            window or 0,
            soft_cap,
            list(slopes),
            list(sinks),
        )

    def append(
        self, step: Int8AttentionStep, k: Tensor, v: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> None:
        """Stores k, v: [T, Hk, D] fp32 with dense heads and equal strides."""
        assert k.dtype == v.dtype == torch.float32
        assert k.shape == v.shape == (step.num_rows, *self._shape[1:]), f"{k.shape} {v.shape}"
        if k.stride() != v.stride() or k.stride()[1:] != (k.shape[2], 1):
            k, v = k.contiguous(), v.contiguous()
        cos = sin = half = 0
        if rotation is not None:
            _check_rotation(rotation, step.num_rows, self._shape[2])
            cos, sin, half = rotation[0].data_ptr(), rotation[1].data_ptr(), rotation[0].shape[1]
        self._op.append(step.plan, k.data_ptr(), v.data_ptr(), k.stride(0), cos, sin, half)

    def attend(self, step: Int8AttentionStep, q: Tensor, lse: Tensor | None = None) -> Tensor:
        """Returns attention [T, H, D] for q: [T, H, D] fp32; writes lse: [T, H] fp32, natural log.

        A row that sees no key gets 0 and an lse of -inf. The bits of a row and head depend neither
        on other rows nor on other K/V heads.
        """
        heads, _, dim = self._shape
        assert q.dtype == torch.float32 and q.shape == (step.num_rows, heads, dim)
        if q.stride()[1:] != (dim, 1):
            q = q.contiguous()
        if lse is not None:
            assert lse.shape == q.shape[:2] and lse.dtype == torch.float32 and lse.is_contiguous()
        out = torch.empty(q.shape, dtype=torch.float32)
        to_lse = 0 if lse is None else lse.data_ptr()
        width = heads * dim
        self._op.attend(step.plan, q.data_ptr(), q.stride(0), out.data_ptr(), width, to_lse)
        return out


def _check_rotation(rotation: tuple[Tensor, Tensor], rows: int, head_dim: int) -> None:
    for table in rotation:
        assert table.dtype == torch.float32 and table.is_contiguous()
        assert table.shape == rotation[0].shape and table.shape[0] == rows, f"{table.shape}"
        assert 2 * table.shape[1] <= head_dim, f"{table.shape} for heads of {head_dim}"


class Ceilings:
    """Peak rates of this machine, as a reference for benchmarks."""

    @staticmethod
    def read(buffer: Tensor) -> None:
        """Reads all bytes of a dense tensor once with all threads."""
        library().read_bytes(buffer.data_ptr(), buffer.numel() * buffer.element_size())

    @staticmethod
    def copy(to: Tensor, source: Tensor) -> None:
        """Copies all bytes of a dense tensor with all threads."""
        size_bytes = source.numel() * source.element_size()
        assert to.numel() * to.element_size() >= size_bytes
        library().copy_bytes(to.data_ptr(), source.data_ptr(), size_bytes)

    @staticmethod
    def multiply_i8(rounds: int) -> float:
        """Multiplies int8 registers; returns the number of operations, two per multiply-add."""
        return float(library().multiply_i8(rounds))

    @staticmethod
    def multiply_bf16(rounds: int) -> float:
        """Multiplies bf16 registers; returns 0 if the processor has no such instruction."""
        return float(library().multiply_bf16(rounds))


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies Backend.rotary in place to x: [T, H, D] fp32 with dense heads."""
    rows, heads, dim = x.shape
    assert x.dtype == torch.float32 and x.stride()[1:] == (dim, 1), f"{x.stride()}"
    _check_rotation((cos, sin), rows, dim)
    if rows:
        half = cos.shape[1]
        args = (x.data_ptr(), x.stride(0), rows, heads, dim, cos.data_ptr(), sin.data_ptr(), half)
        library().rotate(*args)
    return x
