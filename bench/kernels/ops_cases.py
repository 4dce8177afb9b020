"""The cases of bench.kernels.ops: every kernel at the shapes that occur in serving.

Operands rotate through more memory than the caches hold. Kernels between the products ("moved") are
compared with moving as many bytes: the same number is read from far memory, and the same number is
written to memory as cold or as warm as the kernel's own destination. All threads move pieces of
megabytes for that ceiling, however small the kernel's parts are.
"""

from __future__ import annotations

import itertools
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.kernels.ops_attention import (
    HEADS,
    KV_HEADS,
    QuantizedKV,
    decode_cases,
    plain_decode_cases,
    plain_prefill_cases,
    prefill_cases,
    prefix_cases,
)
from bench.kernels.ops_experts import expert_cases
from bench.kernels.ops_latent import latent_cases
from bench.kernels.ops_linear import (
    FAR,
    Case,
    Timed,
    gated_cases,
    int4_cases,
    linear_cases,
    plain_cases,
)
from bench.kernels.ops_states import state_cases
from ops import Fusion, Norm
from ops.cpu import sampling
from ops.cpu.native_ceilings import Ceilings
from ops.cpu.native_partials import merge_into
from ops.cpu.native_quantized_linear import Int8Linear
from ops.cpu.native_rotation import rotate_
from ops.cpu.native_tiled_attention import TiledAttentionStep
from quant.kv import TILE_TOKENS, Int8KVFormat
from serve.request import Request
from serve.runner.sampler import sample
from serve.sampling_params import SamplingParams
from serve.scheduler.sequence import Sequence, make_sequences

# of one request; each row of a case has its own seed and history
SAMPLED: dict[str, dict[str, float | int]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k, top-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}
_PIECE = 2 << 20  # bytes of a copied piece, the size of the second-level caches of two cores


def merge_cases(quick: bool) -> Iterator[Case]:
    """Yields the merge of two partial results of attention into the first."""
    dim = 64
    for rows in (1, 16) if quick else (1, 16, 256):
        count = (8 << 20 if quick else FAR) // (2 * 4 * rows * HEADS * dim)
        operands = torch.ones(count, 2, rows, HEADS, dim)
        written = torch.zeros(count * rows * HEADS * dim)
        lse = torch.zeros(2, rows, HEADS)
        pairs = [(out, part) for out, part in operands]
        none = [(operands[0, 0, :0], operands[0, 1, :0])] * count
        timed = Timed(partial(_merge_all, pairs, lse), partial(_merge_all, none, lse[:, :0]))
        size = 4 * rows * HEADS * dim
        yield _moving("merge parts", rows, operands, size, timed, to=written.view(torch.uint8))


def _merge_all(parts: abc.Sequence[tuple[Tensor, Tensor]], lse: Tensor) -> None:
    for out, part in parts:
        merge_into(out, lse[0], part, lse[1])


def fused_cases(quick: bool) -> Iterator[Case]:
    """Yields fused kernels, which may take 1.3 times as long as moving the bytes they need.

    Norm and quantization write to memory that the product reads at once, which stays warm. K/V is
    cold. Choosing a token writes almost nothing.
    """
    hidden, inner, vocab, dim = 2048, 8192, 128_256, 64
    normed = Int8Linear(
        torch.randn(32, hidden), None, Fusion(Norm("rms", torch.ones(hidden), None, 1e-5))
    )
    plain = Int8Linear(torch.randn(32, inner), None)
    far = 8 << 20 if quick else FAR
    for rows in (1, 32) if quick else (1, 8, 32, 512):
        x = torch.ones(far // (4 * rows * hidden), rows, hidden)
        yield _moving("norm + quantize", rows, x, rows * hidden, _on_each(normed.only_quantize, x))
        h = torch.ones(far // (2 * rows * inner), rows, inner, dtype=torch.bfloat16)
        yield _moving("quantize", rows, h, rows * inner, _on_each(plain.only_quantize, h))
        yield _append_case(rows, dim, far)
        logits = torch.zeros(max(1, far // (4 * rows * vocab)), rows, vocab)
        yield _moving("greedy sampling", rows, logits, 0, _on_each(sampling.argmax, logits))


def row_cases(quick: bool) -> Iterator[Case]:
    """Yields the rotation of q in place, and sampling with temperature and top-p, which reads the
    logits at least once."""
    vocab, dim = 128_256, 64
    far = 8 << 20 if quick else FAR
    choice = sampling.SamplingInputs(seed=1, temperature=0.8, top_p=0.95)
    for rows in (1, 32) if quick else (1, 8, 32, 512):
        q = torch.ones(max(1, far // (4 * rows * HEADS * dim)), rows, HEADS, dim)
        angle = torch.randn(rows, dim // 2)
        rotation = (angle.cos(), angle.sin())
        none = (rotation[0][:0], rotation[1][:0])
        timed = Timed(
            partial(_rotate_all, list(q), rotation), partial(_rotate_all, [q[0, :0]] * len(q), none)
        )
        written = torch.zeros(q.numel() * 4, dtype=torch.uint8)
        yield _moving("RoPE of q", rows, q, rows * HEADS * dim * 4, timed, to=written)
        if rows <= 32:
            # As with a model, some hundred tokens have nearly all of the probability.
            logits = 4 * torch.randn(max(1, far // (4 * rows * vocab)), rows, vocab)
            packed = sampling.packed_rows(rows)
            for row in range(rows):
                choice.pack(packed, row, [5, 6, 7], False)
            timed = Timed(
                partial(_draw_all, list(logits), packed),
                partial(_draw_all, [logits[0, :0]] * len(logits), sampling.packed_rows(0)),
            )
            yield _moving("top-p sampling", rows, logits, 0, timed)


def sampler_cases(quick: bool) -> Iterator[Case]:
    """Yields the runner's whole sampler, by sampling parameters, against reading the logits once.

    The logits are like a model's: 50 likely tokens over a wide floor. Small vocabularies stay in
    caches, as they do in serving; there the calls themselves take the time.
    """
    for vocab in (300,) if quick else (256, 128_000):
        for rows in (2,) if quick else (1, 8, 32):
            count = max(1, min(64, FAR // (4 * rows * vocab)))
            logits = torch.randn(count, rows, vocab) * 2
            logits[..., torch.randperm(vocab)[:50]] += torch.linspace(6, 14, 50)
            for name, params in SAMPLED.items():
                timed = Timed(partial(_sample_all, list(logits), _sampled_rows(rows, params)))
                case = _moving(f"sampler, {name}", rows, logits, 0, timed)
                yield replace(case, shape=f"V={vocab} M={rows}", target=0.0)


def _sampled_rows(count: int, params: dict[str, float | int]) -> list[Sequence]:
    settings = SamplingParams(max_tokens=9, seed=0, **params)  # type: ignore[arg-type]
    requests = [Request(str(i), None, (1, 2, 3), settings, 0.0) for i in range(count)]
    return [make_sequences(request, frozenset({2}))[0] for request in requests]


def _sample_all(parts: abc.Sequence[Tensor], sequences: list[Sequence]) -> None:
    for part in parts:
        sample(part, sequences)


def _rotate_all(parts: abc.Sequence[Tensor], rotation: tuple[Tensor, Tensor]) -> None:
    for part in parts:
        rotate_(part, *rotation)


def _draw_all(parts: abc.Sequence[Tensor], packed: bytearray) -> None:
    for part in parts:
        sampling.sample(part, packed)


def _on_each(run: Callable[[Tensor], object], operands: Tensor) -> Timed:
    parts = list(operands)
    nothing = [operands[0][:0]] * len(parts)
    return Timed(lambda: [run(part) for part in parts], lambda: [run(none) for none in nothing])


def _append_case(rows: int, dim: int, far: int) -> Case:
    """Returns the append of decode rows of as many sequences, or of one prompt of 512 tokens, with
    other sequences in each call."""
    is_prompt = rows == 512
    context, tiles = (rows, rows // TILE_TOKENS) if is_prompt else (TILE_TOKENS, rows)
    form = Int8KVFormat(KV_HEADS, dim, 64)
    count = max(1, far // (tiles * form.tile_bytes))
    kv = QuantizedKV(count if is_prompt else count * rows, context, dim, 1)
    # The sequences of a step are as far apart as the memory allows.
    steps = [kv.step(rows if is_prompt else 1, kv.starts[i::count]) for i in range(count)]
    angle = torch.randn(rows, dim // 2)
    rotation = (angle.cos(), angle.sin())
    operands = torch.ones(max(1, far // (rows * KV_HEADS * dim * 8)), 2, rows, KV_HEADS, dim)
    calls = list(zip(itertools.cycle(steps), *operands.unbind(1), strict=False))
    none = (kv.step(1, []), operands[0, 0, :0], operands[0, 1, :0])
    timed = Timed(
        partial(_append_all, kv, calls, rotation),
        partial(_append_all, kv, [none] * len(calls), (rotation[0][:0], rotation[1][:0])),
    )
    written = torch.zeros(len(calls) * rows * form.token_bytes, dtype=torch.uint8)
    return _moving("RoPE + append", rows, operands, rows * form.token_bytes, timed, to=written)


def _append_all(
    kv: QuantizedKV,
    calls: abc.Sequence[tuple[TiledAttentionStep, Tensor, Tensor]],
    rotation: tuple[Tensor, Tensor],
) -> None:
    """Appends the rows of all steps. It gets kv to keep it alive, as steps have only addresses."""
    (op,) = kv.ops
    for step, k, v in calls:
        op.append(step, k, v, rotation)


def _moving(
    name: str, rows: int, operands: Tensor, written: int, timed: Timed, to: Tensor | None = None
) -> Case:
    """Returns a case whose ceiling is moving the same bytes. operands: [parts, ...], all read.
    written: bytes that each part writes, to the same few megabytes, or to `to`, which has room for
    the bytes of all parts."""
    source = operands.view(-1).view(torch.uint8)
    num_written = written * len(operands)
    pieces = _pieces(source[:num_written])
    warm = torch.zeros(_PIECE, dtype=torch.uint8)
    targets = [warm] * len(pieces) if to is None else _pieces(to)
    copies, rest = list(zip(targets, pieces, strict=True)), source[num_written:]
    none = source[:0]

    def move() -> None:
        for target, piece in copies:
            Ceilings.copy(target, piece)
        Ceilings.read(rest)

    def idle() -> None:
        for target, _ in copies:
            Ceilings.copy(target, none)
        Ceilings.read(none)

    return Case(
        name,
        f"M={rows}",
        "moved",
        float(source.numel() + num_written),
        1 / 1.3,
        timed,
        beside=Timed(move, idle),
    )


def _pieces(x: Tensor) -> list[Tensor]:
    return [x[at : at + _PIECE] for at in range(0, len(x), _PIECE)]


def cases(quick: bool) -> Iterator[Case]:
    linear = (linear_cases, gated_cases, plain_cases, int4_cases)
    plain = (plain_decode_cases, plain_prefill_cases)
    attention = (decode_cases, prefill_cases, prefix_cases, latent_cases, *plain)
    rest = (merge_cases, fused_cases, row_cases, sampler_cases, expert_cases, state_cases)
    for make in (*linear, *attention, *rest):
        yield from make(quick)
