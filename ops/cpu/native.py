"""Our own kernels (ops/csrc) as functions of tensors: checks shapes, passes addresses.

int8 linear layers with what is fused around them, and attention over int8 K/V. The library
takes the best instruction set of the processor (AVX-512 VNNI, AVX2, else portable code).
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
    """The compiled module. RuntimeError when it was not built."""
    if _native is None:
        raise RuntimeError(
            f"the native kernels are not built ({_why}); install the package with "
            "`pip install -e .`, which needs a C++ compiler"
        )
    return _native


def instruction_set() -> str:
    """The kernels in use: avx512, avxvnni, avx2 or portable."""
    return str(library().instruction_set())


def num_threads() -> int:
    """Threads of the team, the caller included."""
    return int(library().num_threads())


def set_num_threads(n: int) -> None:
    """At most the processors this process may use."""
    library().set_num_threads(n)


class NativeLinear:
    """A LinearOp on rows of int8: norm, quantization, product, bias, activation, residual in one.

    Activations are rounded to int8 per row. Rows are fp32 or bf16, the result is fp32 (bf16 after
    an activation: it is quantized again at once). A row's bits do not depend on the other rows.
    """

    def __init__(self, op: Any, num_in: int, num_out: int, fusion: Fusion) -> None:
        """op: the packed product of the library. num_out: after gating."""
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
        """The norm and the quantization without the product, for measuring them."""
        self._op.only_quantize(x.data_ptr(), x.stride(0), TYPES[x.dtype], x.shape[0])


class Int8Linear(NativeLinear):
    """int8 x int8; weights symmetric, with a scale for each output channel."""

    def __init__(
        self,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        scales: Tensor | None = None,
        is_head: bool = False,
    ) -> None:
        """weight: [out, in] fp32 or bf16 (any other float is converted); copied and packed.

        It may be given as parts that stand one under the other. With scales, [out], it is int8
        already and taken as it is: weight * scales. ValueError for more than MAX_INT8_INPUTS
        inputs.
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
    """As many parts as the kernel takes, alike in type, their rows dense."""
    if len(parts) > library().MAX_PARTS or any(part.dtype != parts[0].dtype for part in parts):
        parts = [torch.cat(parts)]
    if parts[0].dtype not in TYPES:
        parts = [part.float() for part in parts]
    return [part if part.stride(1) == 1 else part.contiguous() for part in parts]


class Int4Linear(NativeLinear):
    """4-bit weights with a scale, and maybe a zero point, for each group of inputs."""

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
        """(codes - zeros) * scales, codes - 8 without zeros, or NF4_VALUES[codes] * scales.

        codes: [out, in] uint8 below 16; scales: [out, groups]; zeros: [out, groups] uint8. group:
        one of INT4_GROUPS; the last one may be cut short. Scales are kept as fp16 times a power of
        two of the channel: fp16 and bf16 scales exactly, if within 1 : 2^14 of its largest.
        """
        num_out, num_in = sizes(codes.shape[0], codes.shape[1], fusion)
        shape = (codes.shape[0], -(-num_in // group))
        assert group in INT4_GROUPS and codes.dtype == torch.uint8
        assert not (is_nf4 and zeros is not None)
        assert scales.shape == shape and (zeros is None or zeros.shape == shape), f"{scales.shape}"
        codes, bias = codes.contiguous(), checked_bias(bias, num_out, fusion)
        assert int(codes.max()) < 16, "codes of 4 bits"
        halves, channels = split_scales(scales)
        if is_nf4:  # the kernel's values are whole 127ths
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
    """The kernel takes the norm's addresses, [num_in] each: keep what this returns."""
    if norm is None:
        return None
    weight = norm.weight.float().contiguous()
    bias = None if norm.bias is None else norm.bias.float().contiguous()
    assert weight.shape == (num_in,), f"{weight.shape} for {num_in} inputs"
    assert bias is None or bias.shape == (num_in,), f"{bias.shape} for {num_in} inputs"
    op.set_norm(NORMS[norm.kind], weight.data_ptr(), address(bias), norm.eps)
    return weight, bias


def sizes(rows: int, num_in: int, fusion: Fusion) -> tuple[int, int]:
    """(out after gating, in)"""
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
    """The sequences of one step over int8 K/V, for all layers."""

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
        """starts: byte offset of each range from address; num_rows, kv_lens as in the seam.

        past_only: kv_lens, maybe 0, count the keys before the step. The rows follow them: they
        attend to these alone, and append writes behind them.
        """
        assert len(starts) == len(num_rows) == len(kv_lens), "one of each for every sequence"
        counts = zip(num_rows, kv_lens, strict=True)
        assert all(n > 0 and length >= (0 if past_only else n) for n, length in counts)
        self.num_rows = sum(num_rows)
        self.plan: Any = library().StepPlan(
            address, tile_bytes, starts, num_rows, kv_lens, past_only
        )


class Int8Attention:
    """One layer over int8 K/V: append with rotation and quantization, then attend.

    Switches: window (keys a row sees, itself included), soft_cap (cap * tanh(score / cap)),
    slopes (ALiBi, one per head), sinks (a logit per head that only joins the denominator, but not
    in a step of the past only: it belongs to the part with the row's own key).
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
        """k, v: [T, Hk, D] fp32, rows alike strided, heads side by side."""
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
        """q: [T, H, D] fp32 -> [T, H, D]; lse: [T, H] fp32 to be written, natural log.

        A row that sees no key gives 0 and an lse of -inf. Bits of a row and head depend neither
        on the other rows nor on the other K/V heads.
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
    """What this machine can do at best, for benchmarks to be measured against."""

    @staticmethod
    def read(buffer: Tensor) -> None:
        """Read all bytes of a dense tensor once, with the whole team."""
        library().read_bytes(buffer.data_ptr(), buffer.numel() * buffer.element_size())

    @staticmethod
    def copy(to: Tensor, source: Tensor) -> None:
        """Copy all bytes of a dense tensor, with the whole team."""
        size_bytes = source.numel() * source.element_size()
        assert to.numel() * to.element_size() >= size_bytes
        library().copy_bytes(to.data_ptr(), source.data_ptr(), size_bytes)

    @staticmethod
    def multiply_i8(rounds: int) -> float:
        """int8 multiply-adds on registers; returns the operations done (two per multiply-add)."""
        return float(library().multiply_i8(rounds))

    @staticmethod
    def multiply_bf16(rounds: int) -> float:
        """The same in bf16; 0 where the processor has no such instruction."""
        return float(library().multiply_bf16(rounds))


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Backend.rotary in place: x [T, H, D] fp32 with dense heads."""
    rows, heads, dim = x.shape
    assert x.dtype == torch.float32 and x.stride()[1:] == (dim, 1), f"{x.stride()}"
    _check_rotation((cos, sin), rows, dim)
    if rows:
        half = cos.shape[1]
        args = (x.data_ptr(), x.stride(0), rows, heads, dim, cos.data_ptr(), sin.data_ptr(), half)
        library().rotate(*args)
    return x
