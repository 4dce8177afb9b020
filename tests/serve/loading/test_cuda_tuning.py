"""The first start on a GPU measures products, and a failure of that does not stop the start."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ops.backend import NO_FUSION, LinearOp
from ops.cuda import tune
from ops.cuda.linear import Int8Linear, PlainLinear
from ops.reference import ReferenceBackend
from serve.loading import cuda_tuning
from serve.models import Decoder
from serve.models.families.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from serve.models.layers.blocks import AttentionWeights, Block, DenseMlp
from serve.runner.graph_shapes import StepShapes

CPU = torch.device("cpu")


def product(num_in: int, num_out: int) -> Int8Linear:
    return Int8Linear(torch.randn(num_out, num_in), None, NO_FUSION, device=CPU)


def model_of(qkv: LinearOp, o: LinearOp, up: LinearOp, down: LinearOp, head: LinearOp) -> Decoder:
    """Returns what tune_products reads of a decoder of one layer."""
    attention = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25)
    weights = AttentionWeights(
        spec=attention, backend=ReferenceBackend(), norm_eps=1e-5, q=None, qkv=qkv, o=o
    )
    block = Block(attention=weights, mlp=DenseMlp(up, down))
    layer = LayerSpec(attention=attention, mlp=MlpSpec(size=32))
    made: Any = SimpleNamespace(
        spec=SimpleNamespace(layers=(layer,)), weights=SimpleNamespace(blocks=[block], head=head)
    )
    return made


@pytest.fixture
def model() -> Decoder:
    return model_of(
        product(32, 48), product(32, 32), product(32, 64), product(64, 32), product(32, 96)
    )


@pytest.fixture
def table(tmp_path, monkeypatch) -> tune.Table:
    made = tune.Table(tmp_path / "tuned.json", {"device": "none"})
    monkeypatch.setattr(tune, "table", lambda device: made)
    return made


def record_measured(monkeypatch, table) -> list[tune.Shape]:
    """Replaces tune.tune by one that takes each job's first candidate; returns its shapes."""
    measured: list[tune.Shape] = []

    def keep_all(jobs, device, *, budget_s):
        for job in jobs:
            measured.append(job.shape)
            table.put(job.shape, tune.candidates(job.shape, 90)[0])
        return dict.fromkeys(measured, "")

    monkeypatch.setattr(tune, "tune", keep_all)
    return measured


def test_every_product_is_measured_at_the_step_sizes(model, table, monkeypatch):
    measured = record_measured(monkeypatch, table)
    cuda_tuning.tune_products(model, StepShapes(300, 20), CPU)
    assert len(measured) == len(set(measured))
    of_up = {shape.rows for shape in measured if shape.num_out == 64}
    of_head = {shape.rows for shape in measured if shape.num_out == 96}
    assert of_up == {1, 16, 64, 256, 512} and of_head == {1, 16}
    assert {shape.num_in for shape in measured if shape.adds} == {32, 64}


def test_a_measured_product_is_not_measured_again(model, table, monkeypatch):
    shapes = StepShapes(64, 20)
    measured = record_measured(monkeypatch, table)
    cuda_tuning.tune_products(model, shapes, CPU)
    first = list(measured)
    cuda_tuning.tune_products(model, shapes, CPU)
    assert measured == first
    model.weights.blocks[0].attention.o = product(32, 16)
    cuda_tuning.tune_products(model, shapes, CPU)
    assert {shape.num_out for shape in measured[len(first) :]} == {16}


def test_a_model_without_int8_products_has_nothing_to_measure(table, monkeypatch, caplog):
    measured = record_measured(monkeypatch, table)
    plain = PlainLinear(torch.randn(8, 8), None, NO_FUSION, device=CPU)
    made = model_of(plain, plain, plain, plain, plain)
    with caplog.at_level(logging.WARNING):
        cuda_tuning.tune_products(made, StepShapes(64, 20), CPU)
    assert measured == []
    assert not caplog.records


def test_a_failure_is_logged(model, table, caplog):
    """Measuring fails because there is no device."""
    with caplog.at_level(logging.WARNING):
        cuda_tuning.tune_products(model, StepShapes(64, 20), CPU)
    assert "chosen by rule" in caplog.text
