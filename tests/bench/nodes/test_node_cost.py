"""The cost model of memory devices: its formulas by hand, its choices, and what it prints."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.load.workload.published import AZURE_CONV, Marginal, Published
from bench.nodes.node_cost import (
    H20,
    H100,
    MODELS,
    NETWORK,
    PAPER,
    PRECISIONS,
    compare,
    main,
    mean_context,
    memory_device,
    published,
)
from bench.plan.cost import Attention, Machine, MachineCost
from bench.plan.disaggregated import (
    Figures,
    Split,
    best,
    homogeneous,
    layer_traffic_bytes,
    products_s,
    required_bytes_per_s,
    turn_s,
)
from bench.plan.hardware import Device, Link
from bench.plan.shapes import Shape
from tests.support.engine.child import last_json, output_of

LLAMA_33B, LLAMA_65B, LLAMA_70B = MODELS
BF16 = PRECISIONS[2]
# 1 TB/s, 1 PFLOP/s and 100 GB, of which 0.8, 0.6 and 90 GB count
ROUND = Device(
    name="round",
    kind="gpu",
    memory_bytes=100e9,
    bytes_per_s=1e12,
    operations={"bf16": 1e15},
    peers=Link(1e12, 1e-5),
    network=NETWORK,
    dollars_per_h=2.0,
)


def cost_of(model: Shape, device: Device, number: int = 1) -> MachineCost:
    return MachineCost(model, BF16, Machine(device, number), PAPER)


def attention_s(model: Shape, device: Device, batch: float, context: float) -> float:
    attention = Attention(model, BF16, Machine(device), PAPER)
    return attention.decode(batch, batch * context).seconds


def disaggregated(
    model: Shape, context: float, memory: Device, a: int, b: int, tpot_s: float = math.inf
) -> Figures | None:
    split = Split(model, BF16, H100, memory, (PAPER, PAPER))
    return split.figures(context, a, b, tpot_s=tpot_s)


NOT_DEVICES = (
    *("host", "host:1:2:3", "host:1:2:3:4:5", "host:1:x:3:4", ":1:2:3:4", "H100:1:2:3:4"),
    *("host:0:2:3:4", "host:1:-2:3:4", "host:1:2:nan:4", "host:1:2:3:inf"),
)


def test_traffic_and_kv_of_a_token() -> None:
    assert layer_traffic_bytes(LLAMA_65B) == 64 << 10
    assert layer_traffic_bytes(LLAMA_70B) == 36 << 10
    assert LLAMA_65B.kv_token_bytes(BF16) == 80 * 32 << 10
    assert LLAMA_70B.kv_token_bytes(BF16) == LLAMA_65B.kv_token_bytes(BF16) / 8
    scales = 2 * 8 * (128 // 64) * 2 * 80
    assert LLAMA_70B.kv_token_bytes(PRECISIONS[1]) == LLAMA_70B.kv_token_bytes(BF16) / 2 + scales


@pytest.mark.parametrize("context", [4096, 8192])
def test_the_bandwidth_that_the_paper_asks_for(context: int) -> None:
    """Up to 300 sequences of LLaMA3-70B on H100 and H20 need at most 30 GB/s."""
    asked = [
        required_bytes_per_s(
            LLAMA_70B,
            batch,
            products_s(cost_of(LLAMA_70B, H100), batch),
            attention_s(LLAMA_70B, H20, batch, context),
        )
        for batch in (1, 30, 100, 300)
    ]
    assert asked == sorted(asked) and 10e9 < asked[-1] < 30e9


def test_a_step_by_hand() -> None:
    """40 GB of weights on two devices leave 140 GB for K/V of 163,840 bytes a token."""
    model = replace(published("made up", 40e9, 10, 1000, 1), kv_width=4096)
    found = homogeneous(cost_of(model, ROUND, 2), 1000)
    assert found is not None
    batch = 140e9 / (1000 * 163_840)
    assert found.batch == pytest.approx(batch)
    products = max(40e9 / 1.6e12, 2 * 20e9 * batch / 1.2e15)
    reduces = 20 * (1e-5 + batch * 1000 * 2 / 1e12)
    attention = 140e9 / 1.6e12
    assert found.step_s == pytest.approx(products + reduces + attention)
    assert found.tokens_per_dollar == pytest.approx(batch / found.step_s * 3600 / 4)


def test_a_turn_of_a_and_b_by_hand() -> None:
    """Each of two H100s has 70 GB of weights; one batch hides nothing, so two are in flight."""
    model = published("made up", 140e9, 100, 10_240, 4)
    found = disaggregated(model, 1000, replace(ROUND, bytes_per_s=2e12), 2, 4)
    assert found is not None and found.name == "(2, 4)" and found.in_flight == 2
    assert found.batch == pytest.approx(4 * 90e9 / (1000 * 1.024e6))
    half = found.batch / 2
    products = max(140e9 / (2 * 0.8 * 3.35e12), 2 * 70e9 * half / (2 * 0.6 * 989e12))
    products += 200 * (1e-5 + half * 10_240 * 2 / 450e9)
    attention = half * 1000 * 1.024e6 / 6.4e12
    network = 100 * (33e-6 + half * 51_200 / 100e9)
    assert 2 * attention < products + attention + network > 2 * products
    assert found.step_s == pytest.approx(products + attention + network)
    assert found.tokens_per_dollar == pytest.approx(
        3600 * found.batch / found.step_s / (2 * 11.06 + 4 * 2)
    )
    whole = products_s(cost_of(model, H100, 2), found.batch) + 2 * attention
    assert found.required_bytes_per_s == pytest.approx(found.batch * 100 * 51_200 / (0.2 * whole))


def test_replicas_rotate() -> None:
    """With two replicas and long products, three batches are in flight and make more steps."""
    one, two = (disaggregated(LLAMA_70B, 1500, H20, a, 4) for a in (2, 4))
    assert one is not None and two is not None and one.batch == two.batch
    assert (one.in_flight, two.in_flight) == (2, 3)
    assert 1.5 * one.tokens_per_s < two.tokens_per_s < 2 * one.tokens_per_s


def test_attention_can_be_bound_by_arithmetic() -> None:
    slow = replace(ROUND, operations={"bf16": 1e11})
    read = 1000 * LLAMA_70B.kv_token_bytes(BF16) / 0.8e12
    assert attention_s(LLAMA_70B, ROUND, 10, 100) == pytest.approx(read)
    multiplied = 4 * 1000 * 8192 * 80 / 6e10
    assert attention_s(LLAMA_70B, slow, 10, 100) == pytest.approx(multiplied)


@pytest.mark.parametrize("model", MODELS)
def test_the_batch_fills_the_memory(model: Shape) -> None:
    remote = disaggregated(model, 3000, H20, 2, 4)
    local = homogeneous(cost_of(model, H100, 4), 3000)
    assert remote is not None and local is not None
    assert remote.batch * 3000 * model.kv_token_bytes(BF16) == pytest.approx(4 * 0.9 * 96e9)
    kv_bytes = local.batch * 3000 * model.kv_token_bytes(BF16)
    assert kv_bytes + model.weight_bytes(BF16) == pytest.approx(4 * 0.9 * 80e9)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("context", [1500, 10_000])
def test_more_memory_devices_never_cost_throughput(model: Shape, context: float) -> None:
    found = [disaggregated(model, context, H20, 4, b) for b in range(1, 9)]
    rates = [figures.tokens_per_s for figures in found if figures is not None]
    assert len(rates) == 8
    assert all(after >= before * (1 - 1e-9) for before, after in pairwise(rates))
    assert rates[-1] > 1.2 * rates[0]


def test_two_batches_in_flight() -> None:
    """Two batches are twice as fast where products are bound by arithmetic and take as long as
    attention, no faster where products are bound by weights, and never more than twice as fast."""
    batch = 1000.0
    products = products_s(cost_of(LLAMA_33B, H100), batch)
    half = products_s(cost_of(LLAMA_33B, H100), batch / 2)
    assert half == products / 2
    one = turn_s(products, products, 0.0, 0.0, 1, 1)
    assert turn_s(half, half, 0.0, 0.0, 2, 1) == pytest.approx(one / 2)
    assert turn_s(products, half, 0.0, 0.0, 2, 1) == pytest.approx(one), "weights read twice"
    for attention in (0.1 * products, products, 5 * products):
        one = turn_s(products, attention, 0.002, 0.001, 1, 1)
        two = turn_s(half, attention / 2, 0.002, 0.0005, 2, 1)
        assert one / 2 <= two < one


def test_links_bound_a_turn() -> None:
    """Three batches of 2 s on the links take 6 s, however short the other work is."""
    assert turn_s(1.0, 1.0, 2.5, 2.0, 3, 2) == 6.0
    assert NETWORK.bytes_per_s * 8 == 400e9


def test_what_does_not_fit_is_left_out() -> None:
    assert homogeneous(cost_of(LLAMA_70B, H100), 1500) is None
    assert disaggregated(LLAMA_70B, 1500, H20, 1, 4) is None, "one H100 cannot hold the weights"
    assert disaggregated(LLAMA_70B, 1500, H20, 3, 4) is None, "one and a half replicas"
    assert disaggregated(LLAMA_65B, 50_000, H20, 2, 1) is None, "not one sequence"
    found = best(homogeneous(cost_of(LLAMA_70B, H100, n), 1500) for n in range(1, 4))
    assert found is not None and found.name in ("2 H100", "3 H100")
    assert best(iter([None])) is None
    tiny = replace(H20, memory_bytes=1e9)
    case = compare(LLAMA_65B, "long", 50_000, tiny)
    assert case.lamina is None and case.best["(a, b)"] is None
    assert case.as_json()["ratios"]["tokens_per_s"] is None


def test_the_context_counts_long_answers_more() -> None:
    """Equal requests have a context of prompt and half the answer, others one above their mean."""
    prompt, output = Marginal.lognormal(1000, 999.999999), Marginal.lognormal(101, 100.9999999)
    equal = Published(prompt, output, num_requests=200)
    assert mean_context(equal) == pytest.approx(1000 + 50, rel=0.01)
    assert mean_context(AZURE_CONV) > 1.04 * (1154.7 + 211.1 / 2)


def test_what_is_printed() -> None:
    """The ratios of twelve cases follow from their figures; no choice is worse than Lamina's."""
    result = last_json(output_of("-m", "bench.nodes.node_cost"))
    assert len({(case["model"], case["trace"]) for case in result["cases"]}) == 12
    for case in result["cases"]:
        lamina, beside = case["lamina"], case["beside"]
        for figures in (lamina, beside, *case["best"].values()):
            rate = figures["batch"] / figures["step_s"]
            assert figures["tokens_per_s"] == pytest.approx(rate)
            dollars = 3600 * rate / figures["dollars_per_h"]
            assert figures["tokens_per_dollar"] == pytest.approx(dollars)
        for key, ratio in case["ratios"].items():
            assert ratio == pytest.approx(lamina[key] / beside[key])
        assert 0.9 < lamina["dollars_per_h"] / beside["dollars_per_h"] < 1, "about equal cost"
        assert set(case["best"]) == {"(a, b)", "H100 alone", "H20 alone"}
        for kind, reference in (("(a, b)", lamina), ("H100 alone", beside)):
            found = case["best"][kind]["tokens_per_dollar"]
            assert found >= reference["tokens_per_dollar"] * (1 - 1e-9)


def test_another_memory_device() -> None:
    host = memory_device("host:0.5:4:1500:2.5")
    assert (host.bytes_per_s, host.operations, host.memory_bytes, host.dollars_per_h) == (
        *(0.5e12, {"bf16": 4e12}, 1500e9, 2.5),
    )
    assert host.network == host.peers == NETWORK
    assert "host alone" in compare(LLAMA_33B, "trace", 1500, host).best


@pytest.mark.parametrize("text", NOT_DEVICES)
def test_a_device_that_is_none(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        memory_device(text)
    monkeypatch.setattr(sys, "argv", ["node_cost", "--memory", text])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "argument --memory" in said.err.splitlines()[-1] and text in said.err
    assert said.out == ""


def test_a_bound_on_the_time_between_tokens_makes_the_batch_smaller() -> None:
    free = disaggregated(LLAMA_70B, 1500, H20, 2, 4)
    assert free is not None
    kept = disaggregated(LLAMA_70B, 1500, H20, 2, 4, tpot_s=0.6 * free.step_s)
    assert kept is not None and kept.batch < free.batch
    assert 0.55 * free.step_s < kept.step_s <= 0.6 * free.step_s
    assert disaggregated(LLAMA_70B, 1500, H20, 2, 4, tpot_s=1e-3) is None
