"""Slices and stages of a converted model: logits, order of calls, what is carried, equal bits."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from memory.attention.seam import Ticket
from ops import get_backend
from ops.reference import ReferenceBackend
from serve.converter import stage
from serve.converter.model import ConvertedModel, export, load_converted
from serve.models import count_parameters, run_interleaved
from tests.support.engine.decoders import ListAttention, run, token_ids
from tests.support.engine.foreign import eager_model, foreign
from tests.support.nodes.late_attention import LateAttention
from tests.support.profile import every_day

pytestmark = pytest.mark.usefixtures("one_thread")
CHUNKS = [17, 1, 1, 6]
FAMILIES = ["helium", "cohere", "gpt_neox", "vaultgemma", "diffllama", "granite_swa"]


@functools.cache
def converted(family: str, backend: str = "reference") -> ConvertedModel:
    made = ReferenceBackend() if backend == "reference" else get_backend(backend)
    return load_converted(export(foreign(family), torch.float32), backend=made)


@pytest.mark.parametrize("family", every_day([0], FAMILIES))
def test_logits_equal_transformers(family):
    ids = token_ids(sum(CHUNKS))
    with torch.no_grad():
        expected = eager_model(foreign(family))(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run(converted(family), ids, CHUNKS), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "size"), every_day([0], [("helium", 64), ("cohere", 64), ("vaultgemma", 64)])
)
def test_only_the_hidden_state_is_carried(family, size):
    """Positions and what depends on them alone, such as rotations, are computed in each stage."""
    model = converted(family)
    first, last = model.stage(0, 1), model.stage(1, 1)
    assert [(x.name, x.shape, x.dtype) for x in first.inputs] == [
        ("input_ids", (1, -1), torch.int64)
    ]
    (carried,) = first.outputs
    assert (carried.shape, carried.dtype) == ((1, -1, size), torch.float32)
    assert last.inputs == first.outputs
    assert [x.shape for x in last.outputs] == [(1, -1, model.spec.hidden_size)]


@pytest.mark.parametrize("family", every_day([0], ["helium", "cohere", "diffllama"]))
def test_two_stages_give_the_bits_of_one(family):
    model, ids = converted(family, "cpu"), torch.tensor(token_ids(24))
    half = model.spec.num_layers // 2
    stages = [model.stage(0, half), model.stage(half, model.spec.num_layers - half)]
    whole, split = (ListAttention(model.attention_layers()) for _ in range(2))
    for start, end in ((0, 17), (17, 18), (18, 24)):
        positions = torch.arange(start, end)
        expected = model.forward(ids[start:end], positions, whole)
        carried = [ids[None, start:end]]
        for each in stages:
            carried = _drained(each.slices(carried, positions, split))
            assert len(carried) == len(each.outputs)
        assert torch.equal(carried[0][0], expected)


def _drained(slices: stage.StageSlices) -> list[Tensor]:
    while True:
        try:
            next(slices)
        except StopIteration as end:
            found: list[Tensor] = end.value
            return found


@pytest.mark.parametrize("family", every_day([0], ["helium", "cohere", "gpt_neox"]))
def test_a_slice_computes_q_first_and_what_needs_no_attention_before_it_waits(family):
    """The products of k and v come after `begin`; an MLP beside attention comes before the wait."""
    model = converted(family)
    events: list[object] = []
    for name, product in model.products.items():
        product.op = _noting(product.op, name, events)
    try:
        model.forward(torch.tensor([5, 6]), torch.arange(2), _Noting(events))
    finally:
        for product in model.products.values():
            product.op = product.op.inner
    at = {event: number for number, event in reversed(list(enumerate(events)))}
    prefix = model.spec.model_type if family == "gpt_neox" else "model"
    name = {
        "helium": ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"),
        "cohere": ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"),
        "gpt_neox": ("attention.query_key_value", None, "mlp.dense_4h_to_h"),
    }[family]
    q, k, mlp = (None if n is None else at[f"{prefix}.layers.0.{n}.weight"] for n in name)
    begin, finish, wait = (at[what, 0] for what in ("begin", "finish", "wait"))
    assert q < begin < finish < wait
    if k is not None:
        assert begin < k < finish
    assert (mlp < wait) == (family != "helium"), "parallel blocks need no attention for their MLP"


class _Noting:
    """Attention that notes its calls and returns each row's own values."""

    def __init__(self, events: list[object]) -> None:
        self._events = events

    def begin(self, layer, q):
        self._events.append(("begin", layer))
        return Ticket(layer, q)

    def finish(self, ticket, k, v, rotation):
        self._events.append(("finish", ticket.layer))

        def wait():
            self._events.append(("wait", ticket.layer))
            return v.repeat_interleave(ticket.q.shape[1] // v.shape[1], 1)

        return SimpleNamespace(wait=wait)


def _noting(op, name, events):
    class Noted:
        inner = op

        def __call__(self, x):
            events.append(name)
            return op(x)

    return Noted()


def test_two_micro_batches_give_the_bits_of_one():
    """Their slices alternate, and each has only its own rows."""
    model, ids = converted("helium", "cpu"), torch.tensor(token_ids(12))
    positions = torch.arange(6)
    layers = model.attention_layers()
    apart = [model.forward(part, positions, ListAttention(layers)) for part in (ids[:6], ids[6:])]
    late = LateAttention(SimpleNamespace(plan=lambda step: ListAttention(layers)))
    passes = [model.slices(part, positions, late.plan(None)) for part in (ids[:6], ids[6:])]
    for one, other in zip(run_interleaved(passes), apart, strict=True):
        assert torch.equal(one, other)
    begins = [number for what, number, _ in late.events if what == "begin"]
    assert begins == [0, 1] * len(layers)


def test_a_pass_that_is_closed_leaves_nothing_behind():
    model, ids = converted("helium"), torch.tensor([5, 6, 7])
    attention = ListAttention(model.attention_layers())
    slices = model.slices(ids, torch.arange(3), attention)
    next(slices)
    slices.close()
    assert attention.calls == [("begin", 0), ("finish", 0)]
    again = model.forward(ids, torch.arange(3), ListAttention(model.attention_layers()))
    assert again.shape == (3, model.spec.hidden_size)


@pytest.mark.parametrize("family", every_day([0], ["helium", "gemma", "gpt_neox", "minicpm3"]))
def test_all_parameters_are_counted(family):
    exported = export(foreign(family), torch.float32)
    total = sum(parameter.numel() for parameter in eager_model(foreign(family)).parameters())
    assert exported.spec.counts.total == total
    assert count_parameters(exported.spec) is exported.spec.counts
    assert exported.spec.counts.head == 320 * 64
