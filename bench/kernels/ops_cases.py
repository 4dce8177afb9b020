"""What bench.kernels.ops measures: every kernel at the shapes that serving meets.

Operands rotate through more memory than the caches hold. What stands between the products
("moved") is held against moving as many bytes: as many read from far memory, as many written, to
memory as cold or as warm as the kernel's own destination. That ceiling is the whole team's on
pieces of megabytes, however small the kernel's parts are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor

from bench.kernels.ops_linear import (
    FAR,
    Case,
    Timed,
    gated_cases,
    int4_cases,
    linear_cases,
    plain_cases,
)
from bench.kernels.ops_plain import Attended, plain_decodes, plain_prefills
from ops import Fusion, Norm
from ops.cpu.native import Ceilings, Int8Attention, Int8AttentionStep, Int8Linear, rotate_
from ops.cpu.native_partials import merge_into
from ops.cpu.sampling import Choice, argmax, draw, plans
from quant.kv import TILE_TOKENS, Int8KVFormat

HEADS, KV_HEADS = 32, 8
_PIECE = 2 << 20  # of a copy: the second-level caches of two cores


def _attend_all(kv: KV, step: Int8AttentionStep, q: Tensor) -> None:
    for op in kv.ops:
        op.attend(step, q)


class KV:
    """Int8 K/V of some sequences of one length, in several layers; all zero until filled.

    The kernels know only its address: whoever runs them holds on to it.
    """

    def __init__(self, sequences: int, context: int, dim: int, layers: int) -> None:
        form = Int8KVFormat(KV_HEADS, dim, 64)
        tile_bytes = form.tile_bytes * layers
        range_bytes = -(-context // TILE_TOKENS) * tile_bytes
        self.memory = torch.zeros(sequences * range_bytes + 64, dtype=torch.uint8)
        self.address = self.memory.data_ptr() + -self.memory.data_ptr() % 64
        self.tile_bytes, self.context, self.dim = tile_bytes, context, dim
        self.starts = [i * range_bytes for i in range(sequences)]
        self.ops = [
            Int8Attention(
                offset_bytes=i * form.tile_bytes,
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=dim,
                group=form.group,
                scale=dim**-0.5,
            )
            for i in range(layers)
        ]
        self.bytes_read = form.token_bytes * context * sequences * layers

    def fill(self) -> KV:
        """Every position of every layer, with random values."""
        k = torch.randn(len(self.starts) * self.context, KV_HEADS, self.dim)
        whole = self.step(self.context)
        for op in self.ops:
            op.append(whole, k, k.roll(1, 0), None)
        return self

    def step(
        self, rows: int, starts: Sequence[int] | None = None, *, past_only: bool = False
    ) -> Int8AttentionStep:
        """The last `rows` positions of each sequence, or of those that begin at `starts`; with
        past_only those behind them."""
        starts = self.starts if starts is None else starts
        n = len(starts)
        where = (self.address, self.tile_bytes)
        return Int8AttentionStep(
            *where, starts, [rows] * n, [self.context] * n, past_only=past_only
        )


def decode_cases(quick: bool) -> Iterator[Case]:
    shapes = [(d, b, n) for d in (64, 128) for b in (1, 8, 32) for n in (512, 4096)]
    for dim, batch, context in [(64, 1, 512)] if quick else shapes:
        layer_bytes = Int8KVFormat(KV_HEADS, dim, 64).token_bytes * context * batch
        kv = KV(batch, context, dim, 1 if quick else max(1, min(32, FAR // layer_bytes))).fill()
        step, q = kv.step(1), torch.randn(batch, HEADS, dim)
        keys = torch.randn(batch, KV_HEADS, context, dim).bfloat16()
        query = q.bfloat16()[:, :, None]
        yield Case(
            "decode attention",
            f"B={batch} L={context} {HEADS}/{KV_HEADS} D={dim}",
            "read",
            kv.bytes_read,
            0.8,
            Timed(partial(_attend_all, kv, step, q)),
            peer=partial(
                functional.scaled_dot_product_attention, query, keys, keys, enable_gqa=True
            ),
            peer_work=layer_bytes,
        )


def prefill_cases(quick: bool) -> Iterator[Case]:
    """Only the unmasked part counts as work."""
    shapes = [(d, past) for d in (64, 128) for past in (0, 4096)]
    for dim, past in [(64, 0)] if quick else shapes:
        rows = 64 if quick else 512
        kv = KV(1, past + rows, dim, 1).fill()
        step, q = kv.step(rows), torch.randn(rows, HEADS, dim)
        yield Case(
            "prefill attention",
            f"{rows} on {past} {HEADS}/{KV_HEADS} D={dim}",
            "bf16",
            4 * HEADS * dim * (rows * past + rows * (rows + 1) // 2),
            0.5,
            Timed(partial(_attend_all, kv, step, q)),
        )


def past_cases(quick: bool) -> Iterator[Case]:
    """What a memory node does: decode rows and chunks over the keys held before the step."""
    for dim, batch, context in [(64, 1, 512)] if quick else [(64, 8, 4096), (128, 8, 4096)]:
        layer_bytes = Int8KVFormat(KV_HEADS, dim, 64).token_bytes * context * batch
        kv = KV(batch, context, dim, 1 if quick else max(1, FAR // layer_bytes)).fill()
        step, q = kv.step(1, past_only=True), torch.randn(batch, HEADS, dim)
        timed = Timed(partial(_attend_all, kv, step, q))
        shape = f"B={batch} L={context} {HEADS}/{KV_HEADS} D={dim}"
        yield Case("past attention", shape, "read", kv.bytes_read, 0.8, timed)
    for dim, rows in [(64, 16)] if quick else [(d, n) for d in (64, 128) for n in (64, 256)]:
        past = 64 if quick else 4096
        kv = KV(1, past, dim, 1).fill()
        step, q = kv.step(rows, past_only=True), torch.randn(rows, HEADS, dim)
        timed = Timed(partial(_attend_all, kv, step, q))
        shape = f"{rows} on {past} {HEADS}/{KV_HEADS} D={dim}"
        yield Case("past attention", shape, "bf16", 4.0 * HEADS * dim * rows * past, 0.5, timed)


def merge_cases(quick: bool) -> Iterator[Case]:
    """Two parts to one, in the place of the first."""
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


def _merge_all(parts: Sequence[tuple[Tensor, Tensor]], lse: Tensor) -> None:
    for out, part in parts:
        merge_into(out, lse[0], part, lse[1])


def plain_prefill_cases(quick: bool) -> Iterator[Case]:
    """Only the unmasked part counts as work, for the peer too."""
    for found in plain_prefills(quick, HEADS, KV_HEADS):
        yield _plain_case("bf16 prefill attention", "bf16", 0.5, found)


def plain_decode_cases(quick: bool) -> Iterator[Case]:
    """K/V in bf16, what is taken where int8 K/V is off."""
    for found in plain_decodes(quick, HEADS, KV_HEADS, FAR):
        yield _plain_case("bf16 decode attention", "read", 0.8, found)


def _plain_case(name: str, ceiling: str, target: float, found: Attended) -> Case:
    return Case(
        name,
        found.shape,
        ceiling,
        found.work,
        target,
        Timed(found.run),
        peer=found.peer,
        peer_work=found.peer_work,
    )


def fused_cases(quick: bool) -> Iterator[Case]:
    """Against moving what they must read and write, 1.3 times that at most.

    Norm and quantization write where the product reads at once, so to memory that stays warm;
    K/V is cold; choosing a token writes nothing to speak of.
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
        yield _moving("greedy sampling", rows, logits, 0, _on_each(argmax, logits))


def row_cases(quick: bool) -> Iterator[Case]:
    """The rotation of q where it lies, and tokens drawn with temperature and top-p, which reads
    the logits once at least."""
    vocab, dim = 128_256, 64
    far = 8 << 20 if quick else FAR
    choice = Choice(seed=1, temperature=0.8, top_p=0.95)
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
            # as peaked as a model's: some hundred tokens have nearly all of the probability
            logits = 4 * torch.randn(max(1, far // (4 * rows * vocab)), rows, vocab)
            packed = plans(rows)
            for row in range(rows):
                choice.pack(packed, row, [5, 6, 7], False)
            timed = Timed(
                partial(_draw_all, list(logits), packed),
                partial(_draw_all, [logits[0, :0]] * len(logits), plans(0)),
            )
            yield _moving("top-p sampling", rows, logits, 0, timed)


def _rotate_all(parts: Sequence[Tensor], rotation: tuple[Tensor, Tensor]) -> None:
    for part in parts:
        rotate_(part, *rotation)


def _draw_all(parts: Sequence[Tensor], packed: bytearray) -> None:
    for part in parts:
        draw(part, packed)


def _on_each(run: Callable[[Tensor], object], operands: Tensor) -> Timed:
    parts = list(operands)
    nothing = [operands[0][:0]] * len(parts)
    return Timed(lambda: [run(part) for part in parts], lambda: [run(none) for none in nothing])


def _append_case(rows: int, dim: int, far: int) -> Case:
    """Decode rows of as many sequences, or one prompt of 512; other sequences every time."""
    is_prompt = rows == 512
    context, tiles = (rows, rows // TILE_TOKENS) if is_prompt else (TILE_TOKENS, rows)
    form = Int8KVFormat(KV_HEADS, dim, 64)
    count = max(1, far // (tiles * form.tile_bytes))
    kv = KV(count if is_prompt else count * rows, context, dim, 1)
    # the sequences of a step lie as far apart as the memory lets them
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
    kv: KV,
    calls: Sequence[tuple[Int8AttentionStep, Tensor, Tensor]],
    rotation: tuple[Tensor, Tensor],
) -> None:
    """Also holds on to kv: the steps know addresses."""
    (op,) = kv.ops
    for step, k, v in calls:
        op.append(step, k, v, rotation)


def _moving(
    name: str, rows: int, operands: Tensor, written: int, timed: Timed, to: Tensor | None = None
) -> Case:
    """operands: [parts, ...], all read. written: bytes for each part, which go to the same few
    megabytes again and again, or to as much memory as they are, `to`."""
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
    attention = (decode_cases, prefill_cases, past_cases, *plain)
    for make in (*linear, *attention, merge_cases, fused_cases, row_cases):
        yield from make(quick)
