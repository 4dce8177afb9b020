"""Operators with a state (ops/states.py) on the native kernels.

ops/csrc/states_linear.inl says how linear attention goes through a state, and why a row has the
same bits however the rows of its sequence are cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops.cpu.native_library import TYPES, address, library
from ops.states import Recurrence, StateSegments


class NativeStates:
    """Implements StateOps for rows in fp32 or bf16. Every segment has at least one row.

    Sequences of a step may read the same record, but none may read what another one writes.
    ValueError for segments that are not in order, or records that do not exist.
    """

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        states: Tensor,
        segments: StateSegments,
    ) -> Tensor:
        channels, width = weight.shape
        assert x.shape[1] == channels and 2 <= width <= library().MAX_CONV_WIDTH, f"{weight.shape}"
        assert states.shape[1:] == (width - 1, channels), f"{states.shape} for {weight.shape}"
        assert activation in (None, "silu"), f"{activation}"
        weight, bias = _fp32(weight), None if bias is None else _fp32(bias)
        assert bias is None or bias.shape == (channels,), f"{bias.shape}"
        out, x = torch.empty(x.shape, dtype=x.dtype), _dense(x)
        library().convolve(
            _plan(states, segments, len(x)),
            *_rows(x),
            TYPES[x.dtype],
            channels,
            width,
            weight.data_ptr(),
            address(bias),
            activation == "silu",
            out.data_ptr(),
        )
        return out

    def linear_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor | None,
        rule: Recurrence,
        states: Tensor,
        segments: StateSegments,
    ) -> Tensor:
        rows, heads, value_dim = v.shape
        _, key_heads, key_dim = k.shape
        channels = (heads, key_dim) if rule.bias.ndim == 2 else (heads,)
        assert q.shape == k.shape and k.shape[0] == rows and heads % key_heads == 0, f"{q.shape}"
        assert states.shape[1:] == (heads, key_dim, value_dim), f"{states.shape}"
        assert rule.bias.shape == channels and a.shape == (rows, *channels), f"{a.shape}"
        assert rule.is_delta or rule.bias.ndim == 1, "decays of channels only with is_delta"
        assert rule.is_delta == (b is not None), "b is for is_delta alone"
        assert b is None or b.shape == (rows, heads), f"{b}"
        assert all(x is None or x.dtype == v.dtype for x in (q, k, a, b)), "rows of one type"
        out = torch.empty(v.shape, dtype=v.dtype)
        inputs = [None if x is None else _dense(x) for x in (q, k, v, a, b)]
        places = [number for x in inputs for number in ((0, 0) if x is None else _rows(x))]
        call, kept = _call(rule, heads, key_heads, key_dim, value_dim)
        call.run(_plan(states, segments, rows), TYPES[v.dtype], *places, out.data_ptr())
        del kept  # not before the call
        return out

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        eps: float,
        *,
        group: int,
        activation: str,
        gates_first: bool = False,
    ) -> Tensor:
        rows, size = x.shape
        assert gate.shape == x.shape and size % group == 0, f"{gate.shape}, groups of {group}"
        assert activation in ("silu", "sigmoid"), activation
        weight = None if weight is None else _fp32(weight)
        assert weight is None or weight.shape == (size,), f"{weight.shape}"
        out, x, gate = torch.empty(x.shape, dtype=x.dtype), _dense(x), _dense(gate)
        library().gate_and_norm(
            *_rows(x),
            TYPES[x.dtype],
            *_rows(gate),
            TYPES[gate.dtype],
            rows,
            size,
            group,
            address(weight),
            eps,
            activation == "silu",
            gates_first,
            out.data_ptr(),
        )
        return out


def _fp32(x: Tensor) -> Tensor:
    assert x.dtype == torch.float32, f"{x.dtype}, not fp32"
    return x.contiguous()


def _has_dense_rows(x: Tensor) -> bool:
    size = 1
    for length, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def _dense(x: Tensor) -> Tensor:
    """Returns x, or a copy if its rows are not dense."""
    return x if _has_dense_rows(x) else x.contiguous()


def _rows(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.stride(0)


def _plan(states: Tensor, segments: StateSegments, rows: int) -> Any:
    """Returns the library's plan of a step; it has only addresses."""
    assert states.dtype == torch.float32, f"states in {states.dtype}"
    assert _has_dense_rows(states), "records are dense"
    assert all(x.dtype == torch.int64 and x.is_contiguous() for x in segments), "int64 segments"
    return library().StatePlan(
        segments.firsts.data_ptr(),
        segments.sources.data_ptr(),
        segments.targets.data_ptr(),
        len(segments.sources),
        segments.sequences.data_ptr(),
        len(segments.sequences) - 1,
        states.data_ptr(),
        states.stride(0),
        len(states),
        rows,
    )


def _call(rule: Recurrence, heads: int, key_heads: int, key_dim: int, value_dim: int) -> Any:
    """Returns the library's call for a rule and shape, and the tensors that it has addresses of."""
    skip = None if rule.skip is None else _fp32(rule.skip)
    rates, bias = _fp32(rule.rates), _fp32(rule.bias)
    assert rates.shape == (heads,) and (skip is None or skip.shape == (heads,)), f"{rates.shape}"
    call = library().LinearAttentionCall(
        heads,
        key_heads,
        key_dim,
        value_dim,
        rates.data_ptr(),
        bias.data_ptr(),
        address(skip),
        rule.is_delta,
        rule.bias.ndim == 2,
        rule.has_unit_keys,
        rule.scale,
        rule.beta_scale,
        rule.dt_min,
        rule.dt_max,
    )
    return call, (rates, bias, skip)
