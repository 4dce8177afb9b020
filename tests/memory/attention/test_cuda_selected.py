"""Decode rows on the CUDA back end that read a part of their K/V, through the seam."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from memory.attention.grouped import group_layers
from memory.attention.seam import AttentionLayer, AttentionStep, layers_in, single_rows
from memory.policies.selection import Selection
from memory.policies.setting import parse_kv_policy
from ops.reference import attention_fp64, round_kv
from quant.kv import fitting_group
from tests.support.memory.selected_kv import selected_attention

pytest.importorskip("triton")

from memory.attention.cuda import (
    CudaAttention,
    CudaKVLayout,
    padded_dim,
    selected_rows,
    step_arrays,
)
from ops.kv_tiles import key_bounds_bytes
from tests.support.cuda.cuda_kv import DEVICE
from tests.support.cuda.selected_tiles import TILE, chosen_by, rounded_bounds

pytestmark = [
    pytest.mark.usefixtures("seeded"),
    pytest.mark.skipif(DEVICE != "cpu", reason="the tensors of these tests are on the CPU"),
]
MAX_LEN = 320
LAYERS = [
    AttentionLayer(4, 2, 40, 0.15),
    AttentionLayer(2, 1, 32, 0.1, window=40),
    AttentionLayer(2, 2, 40, 0.2, soft_cap=3.0, sinks=(0.5, -1.0), shares=0),
]
# (sequence, rows) of each step, and how many of the first ones decode
STEPS = [
    ([(0, 62), (1, 30)], 0),
    ([(0, 1), (1, 3), (2, 5)], 2),  # a draft that completes a tile, of which one row is accepted
    ([(1, 2), (0, 1)], 2),
    ([(1, 1), (0, 1), (2, 1)], 3),
]
KEPT = {(1, 1): 1}  # the rows of a step and sequence that stay
PROMPTS = [62, 31, 6]  # one row beside others is the last of its prompt


class Memory:
    """Attention of layers over three ranges of MAX_LEN tokens, with a group for each window."""

    def __init__(self, layers: list[AttentionLayer], kind: str, policy: str) -> None:
        setting = parse_kv_policy(policy)
        self.selection = None if setting is None else Selection(setting)
        groups, dtype = group_layers(layers, MAX_LEN), getattr(torch, kind)
        layouts = [
            CudaKVLayout(layers_in(layers, ids), dtype, 32, has_bounds=setting is not None)
            for _, ids in groups
        ]
        self.buffers = [
            torch.full((3 * MAX_LEN * x.token_bytes + 64,), 0x7F, dtype=torch.uint8)
            for x in layouts
        ]
        arrays = step_arrays(
            layers, max_rows=256, max_seqs=8, max_len=MAX_LEN, device=torch.device("cpu")
        )
        bases = [x.data_ptr() + -x.data_ptr() % 16 for x in self.buffers]
        ids = [ids for _, ids in groups]
        selected = selected_rows(self.selection, layouts, arrays)
        self.attention = CudaAttention(layouts, ids, bases, arrays, None, selected)


def results(memory: Memory, layers: list[AttentionLayer], *, only: int | None = None):
    """Runs STEPS; returns {(step, layer, sequence): (q, k and v so far, results)}. only: the
    sequence whose rows alone are computed."""
    generator = torch.Generator().manual_seed(3)
    kept = {(i, s): [torch.zeros(0)] * 2 for i in range(len(layers)) for s in range(3)}
    found, lengths = {}, [0, 0, 0]
    for number, (parts, num_decodes) in enumerate(STEPS):
        new = {
            (i, s, j): torch.randn(n, heads, x.head_dim, generator=generator)
            for s, n in parts
            for i, x in enumerate(layers)
            for j, heads in enumerate((x.num_heads, x.num_kv_heads, x.num_kv_heads))
        }
        decodes = sum(only in (None, s) for s, _ in parts[:num_decodes])
        chosen = [(s, n) for s, n in parts if only in (None, s)]
        if not chosen:
            continue
        rows, seqs = [n for _, n in chosen], [s for s, _ in chosen]
        ends = [lengths[s] + n for s, n in chosen]
        starts, prompts = [s * MAX_LEN for s in seqs], [PROMPTS[s] for s in seqs]
        step = single_rows(AttentionStep(decodes, starts, rows, ends, prompts))
        plan = memory.attention.plan(step)
        for i, layer in enumerate(layers):
            q, k, v = (torch.cat([new[i, s, j] for s in seqs]) for j in range(3))
            given = (k.clone(), v) if layer.shares is None else (None, None)
            out = plan.finish(plan.begin(i, q), *given, None).wait()
            for (s, n), part in zip(chosen, out.split(rows), strict=True):
                if layer.shares is None:
                    own = [new[i, s, 1], new[i, s, 2]]
                    pairs = zip(kept[i, s], own, strict=True)
                    every = [torch.cat((x, y)) if len(x) else y for x, y in pairs]
                    stay = lengths[s] + KEPT.get((number, s), n)
                    kept[i, s] = [x[:stay] for x in every]
                    found[number, i, s] = (new[i, s, 0], every, part)
                else:
                    found[number, i, s] = (new[i, s, 0], found[number, layer.shares, s][1], part)
        for s, n in chosen:
            lengths[s] += KEPT.get((number, s), n)
    return found


def expected(layer, q, kv, policy, num_decoded, kind):
    """Returns the results of rows, the last num_decoded of which choose."""
    if kind == "int8":
        missing = padded_dim(layer.head_dim) - layer.head_dim
        group = fitting_group(layer.head_dim + missing, 32)
        kv = [round_kv(pad(x, (0, missing)), group)[..., : layer.head_dim].double() for x in kv]
    k, v = kv
    options = {"window": layer.window, "soft_cap": layer.soft_cap, "sinks": layer.sinks}
    whole = attention_fp64(q, k, v, layer.scale, **options).out
    if layer.window is not None:
        return whole
    for i in range(len(q) - num_decoded, len(q)):
        length = len(k) - len(q) + i + 1
        own, budget = (length - 1) // TILE, -(-policy.budget(length) // TILE)
        if budget > own:
            continue
        read, is_clear = chosen_by(q[i], tuple(x[:own] for x in rounded_bounds(k)), own, budget)
        assert is_clear.all(), "choose another seed"
        del options["window"]
        whole[i] = selected_attention(q[i], k[:length], v[:length], read, layer.scale, **options)
        options["window"] = None
    return whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["int8", "float32", "bfloat16"])
def test_rows_after_the_prompt_read_what_they_choose(kind):
    memory = Memory(LAYERS, kind, "quest:budget=32,least=1")
    policy, num_chosen = memory.selection.policy, 0
    for (_, i, s), (q, kv, out) in results(memory, LAYERS).items():
        layer = LAYERS[i]
        if kind == "bfloat16":  # the interpreter does not round, but cuts
            kv = [(x.view(torch.int32) & ~0xFFFF).view(torch.float32) for x in kv]
        decoded = min(len(q), max(0, len(kv[0]) - PROMPTS[s]))
        wanted = expected(layer, q, kv, policy, decoded, kind)
        tolerance = 1e-5 if kind == "float32" else 1e-4
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=tolerance)
        num_chosen += decoded
    assert num_chosen == len(LAYERS) * (3 + 5)
    # lengths 63, 64, 65 of one sequence, and 32, 33 (of which none stays), 32, 33, 34
    held = 4 + 4 + 5 + 2 + 3 + 2 + 3 + 3
    assert memory.selection.counts() == {"read": 8 * 2, "held": held}


@pytest.mark.exhaustive
def test_a_budget_of_everything_gives_the_bits_of_no_policy():
    layers = LAYERS[:2]
    plain, whole, least = (
        results(Memory(layers, "int8", policy), layers)
        for policy in ("off", "quest:budget=100%", "quest:budget=1,least=1")
    )
    assert all(torch.equal(plain[at][2], whole[at][2]) for at in plain)
    differ = {at for at in plain if not torch.equal(plain[at][2], least[at][2])}
    assert differ == {(1, 0, 0), (1, 0, 1), (2, 0, 0), (2, 0, 1), (3, 0, 0), (3, 0, 1)}


def test_bounds_follow_the_layers_that_see_all_keys():
    layers = [*LAYERS, replace(LAYERS[1], shares=1), replace(LAYERS[0], is_late=True)]
    for kind in (torch.int8, torch.bfloat16):
        plain, layout = (CudaKVLayout(layers, kind, 32, has_bounds=x) for x in (False, True))
        assert layout.bounds == [True, False, True, False, False]
        assert not any(plain.bounds)
        more = key_bounds_bytes(2, padded_dim(40))
        assert layout.tile_bytes == plain.tile_bytes + more
        assert layout.offsets[2] == layout.offsets[0]
        assert layout.offsets[1] == plain.offsets[1] + more
