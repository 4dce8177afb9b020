"""What fits on a machine, what its requests get, and which machine is best."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from bench.plan.capacity import kv_bytes, max_sequences, max_tokens, sequence_bytes
from bench.plan.cost import Machine, MachineCost
from bench.plan.efficiency import BOUND, expected
from bench.plan.hardware import Device, Link, load_devices
from bench.plan.plots import curve
from bench.plan.search import Budget, Choice, all_machines, choose, rank, rank_splits
from bench.plan.serving import (
    MAX_SHARE,
    Load,
    Serving,
    Slo,
    best,
    decode_work,
    prefill_s,
    serve,
)
from bench.plan.shapes import Precision, load_shape
from memory.attention.tiled import TiledKVLayout
from memory.pages.layer_groups import LayerGroup
from serve.config import EngineConfig, default_model_path
from serve.errors import ConfigError
from serve.loading.kv_sizing import size_kv
from serve.models import read_spec
from serve.scheduler.step_time import StepWork

DEVICES = load_devices()
LLAMA_8B = load_shape("llama-3.1-8b")
INT8 = Precision("int8", "int8")
CHAT = Load(prompt=1000, output=200)


def cost_of(
    name: str, number: int = 1, model: str = "llama-3.1-8b", precision: Precision = INT8
) -> MachineCost:
    device = DEVICES[name]
    efficiency = expected(device.kind, precision)
    return MachineCost(load_shape(model), precision, Machine(device, number), efficiency)


def served(found: Serving | str) -> Serving:
    assert isinstance(found, Serving), found
    return found


# ---- what fits


def test_capacity_is_what_the_engine_maps() -> None:
    """The plan's tokens equal those of the engine's pages, but for padding."""
    spec = read_spec(default_model_path())
    layout = TiledKVLayout(spec.attention_layers, "int8", 64)
    config = EngineConfig(kv_cache_bytes=64 << 20)
    sizes = size_kv(config, spec, [LayerGroup(layout.token_bytes, layout.tile_tokens)])
    mapped = sizes.num_pages * sizes.page_bytes // sizes.groups[0].token_bytes
    shape = load_shape("default")
    memory_bytes = (64 << 20) + shape.weight_bytes(INT8)
    device = replace(DEVICES["zen5-2vcpu"], memory_bytes=memory_bytes)
    cost = MachineCost(shape, INT8, Machine(device), BOUND)
    assert kv_bytes(cost) == 64 << 20
    padding = layout.token_bytes / sizes.groups[0].token_bytes
    assert 0.9 < padding <= 1 and mapped == pytest.approx(padding * max_tokens(cost), rel=1e-3)
    assert max_sequences(cost, 1000) == max_tokens(cost) // 1000


def test_windows_keep_less() -> None:
    """Mistral 0.1 keeps 4,096 tokens of every sequence."""
    shape, bf16 = load_shape("mistral-7b-v0.1"), Precision()
    one = shape.kv_token_bytes(bf16)
    assert one == 32 * 2 * 1024 * 2
    assert sequence_bytes(shape, bf16, 1000) == 1000 * one
    assert sequence_bytes(shape, bf16, 30_000) == 4096 * one


def test_weights_that_do_not_fit() -> None:
    cost = cost_of("l4", model="llama-3.1-70b")
    assert kv_bytes(cost) < 0 and max_tokens(cost) == max_sequences(cost, 1) == 0
    assert best(cost, CHAT, Slo()) == "memory"


def test_heads_on_two_devices_count_twice() -> None:
    """Two K/V heads on four devices have the room of two devices."""
    two, four = (cost_of("h100-sxm", n, "qwen2.5-0.5b") for n in (2, 4))
    weights = two.shape.weight_bytes(INT8)
    assert kv_bytes(two) == pytest.approx(2 * 0.9 * 80e9 - weights)
    assert kv_bytes(four) == pytest.approx((4 * 0.9 * 80e9 - weights) / 2)


# ---- what requests get


def test_a_prompt_alone() -> None:
    """Chunks add up to the prompt, and only the last one samples a token."""
    seen: list[StepWork] = []

    class Cost:
        def seconds(self, work: StepWork) -> float:
            seen.append(work)
            return 2.0

    assert prefill_s(Cost(), 1000, 300) == 8.0
    assert [work.num_rows for work in seen] == [300, 300, 300, 100]
    assert [work.samples for work in seen] == [False, False, False, True]
    whole = StepWork()
    whole.add(1000, 0)
    assert sum(work.num_pairs for work in seen) == whole.num_pairs


def test_rates_and_times_of_a_load() -> None:
    """There are as many prompt rows as the answers' tokens need, and no chunk exceeds the SLO."""
    cost, batch = cost_of("h100-sxm"), 100
    slo = Slo(ttft_s=2.0, tpot_s=0.03)
    found = served(serve(cost, CHAT, slo, batch))
    decode_s = cost.seconds(decode_work(batch, 1100))
    share = batch * 1000 / (200 * found.chunk)
    assert 0 < share <= MAX_SHARE
    assert found.step_s == pytest.approx((1 - share) * decode_s + share * found.longest_s)
    assert decode_s < found.step_s < found.longest_s <= 0.03
    assert found.tokens_per_s == pytest.approx(batch / found.step_s)
    assert found.requests_per_s == pytest.approx(found.tokens_per_s / 200)
    alone_s = prefill_s(cost, 1000, 8192)
    assert alone_s < found.ttft_s <= 2.0


def test_nothing_is_said_of_what_cannot_be_kept() -> None:
    cost = cost_of("h100-sxm")
    assert serve(cost, CHAT, Slo(tpot_s=1e-3), 8) == "tpot"
    assert serve(cost, CHAT, Slo(tpot_s=0.02), 300) == "prompts"
    assert serve(cost, CHAT, Slo(ttft_s=0.01), 300) == "ttft"
    assert isinstance(serve(cost, CHAT, Slo(), 300), Serving)


@pytest.mark.parametrize("slo", [Slo(), Slo(tpot_s=0.1), Slo(tpot_s=0.2, ttft_s=1.0)])
def test_the_best_batch_is_the_largest(slo: Slo) -> None:
    cost = cost_of("l4")
    found = served(best(cost, CHAT, slo))
    most = max_sequences(cost, CHAT.context)
    tried = [serve(cost, CHAT, slo, batch) for batch in range(1, most + 1)]
    kept = [one for one in tried if isinstance(one, Serving)]
    assert tried[: len(kept)] == kept, "no gap below it"
    assert replace(found, limit="") == kept[-1]
    assert found.limit == ("memory" if found.batch == most else tried[found.batch])


def test_a_tighter_slo_never_gives_more() -> None:
    cost = cost_of("a100-80")
    rates = [
        served(best(cost, CHAT, Slo(tpot_s=limit))).tokens_per_s for limit in (0.02, 0.05, 0.2, inf)
    ]
    assert rates == sorted(rates) and rates[0] < rates[-1]


def test_curves_rise() -> None:
    """With more sequences the time between tokens and the tokens a second both rise."""
    points = curve(cost_of("l4"), CHAT)
    assert len(points) > 10
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(points))
    assert curve(cost_of("l4", model="llama-3.1-70b"), CHAT) == []


# ---- which machine


def ranked(slo: Slo = Slo(), budget: Budget = Budget(), **more: Device) -> list[Choice]:  # noqa: B008
    devices = {name: DEVICES[name] for name in ("l4", "h100-sxm", "rtx-5090", "epyc-9755")} | more
    return rank(LLAMA_8B, INT8, all_machines(devices), CHAT, slo, budget)


def test_the_cheapest_tokens_first() -> None:
    """Machines without a price follow, the fastest first."""
    found = [choice for choice in ranked() if choice.serving]
    assert {choice.machine.num_devices for choice in found} == {1, 2, 4, 8}
    prices = [choice.dollars_per_m for choice in found]
    priced = [price for price in prices if price is not None]
    assert priced == sorted(priced) and len(priced) == 8
    assert prices[8:] == [None] * 5
    rates = [choice.serving.tokens_per_s for choice in found[8:] if choice.serving]
    assert rates == sorted(rates, reverse=True)
    first = found[0]
    assert first.serving and first.machine.dollars_per_h
    assert first.dollars_per_m == pytest.approx(
        first.machine.dollars_per_h / (3600 * first.serving.tokens_per_s) * 1e6
    )


def test_a_price_decides() -> None:
    cheap = replace(DEVICES["h100-sxm"], name="gift", dollars_per_h=0.01)
    assert ranked(gift=cheap)[0].machine.name == "gift"


def test_a_budget() -> None:
    found = ranked(budget=Budget(dollars_per_h=4.0))
    assert {c.machine.name for c in found if c.serving} == {
        "l4",
        "2xl4",
        "4xl4",
        "8xl4",
        "h100-sxm",
    }
    reasons = {c.machine.name: c.reason for c in found}
    assert reasons["2xh100-sxm"] == "budget" and reasons["rtx-5090"] == "no price"
    least = min(c.dollars_per_m for c in ranked() if c.dollars_per_m)
    cheapest = ranked(budget=Budget(dollars_per_m=least))
    assert [c.dollars_per_m for c in cheapest if c.serving] == [least]


def test_what_no_machine_can() -> None:
    """Machines without fp8, with too little memory or too slow have their reasons."""
    fp8 = Precision("fp8", "bfloat16")
    chosen = choose(LLAMA_8B, fp8, Machine(DEVICES["a100-80"]), CHAT, Slo())
    assert chosen.serving is None and chosen.reason == "a100-80 does not multiply fp8"
    reasons = {c.machine.name: c.reason for c in ranked(Slo(tpot_s=0.01))}
    assert reasons["epyc-9755"] == "tpot" and reasons["h100-sxm"] is None


def test_devices_share_heads() -> None:
    """A K/V head may be on several devices, a query head may not."""
    shape = load_shape("qwen2.5-7b")
    assert (shape.num_heads, shape.num_kv_heads) == (28, 4)
    for number in (1, 2, 4, 28):
        shape.require_divisible(number)
    for number in (3, 7, 8, 14):
        with pytest.raises(ConfigError, match=f"not divisible between {number} devices"):
            shape.require_divisible(number)
    chosen = choose(shape, INT8, Machine(DEVICES["l4"], 8), CHAT, Slo())
    assert chosen.reason == "28 heads, 4 of K/V, are not divisible between 8 devices"


def test_pairs_that_cannot_compute_are_left_out() -> None:
    devices = [DEVICES[name] for name in ("a100-80", "h100-sxm")]
    fp8 = Precision("fp8", "bfloat16")
    found = rank_splits(LLAMA_8B, fp8, devices, CHAT, Slo(), Budget())
    assert {choice.compute.name for choice in found} == {"h100-sxm"}


def test_pairs_are_rated_with_the_network_there_is() -> None:
    """A pair may need more bandwidth than the network has, but never uses more."""
    found = []
    for rate in (1e9, 50e9):
        device = replace(DEVICES["h100-sxm"], network=Link(rate, 33e-6))
        found += rank_splits(LLAMA_8B, INT8, [device], CHAT, Slo(), Budget())
    slow, fast = found
    assert slow.used_bytes_per_s <= 1.001 * slow.network_bytes_per_s
    assert slow.used_bytes_per_s > 0.9 * slow.network_bytes_per_s
    assert (slow.figures.required_bytes_per_s or 0.0) > slow.network_bytes_per_s
    assert fast.used_bytes_per_s < fast.network_bytes_per_s
    assert slow.figures.tokens_per_s / slow.b < fast.figures.tokens_per_s / fast.b


def test_pairs_of_devices() -> None:
    devices = [DEVICES[name] for name in ("h100-sxm", "h20", "epyc-9654", "rtx-4090")]
    shape, bf16 = load_shape("llama-3.1-70b"), Precision()
    found = rank_splits(shape, bf16, devices, CHAT, Slo(), Budget())
    names = {(choice.compute.name, choice.memory.name) for choice in found}
    assert names == {(a, b) for a in ("h100-sxm", "h20") for b in ("h100-sxm", "h20", "epyc-9654")}
    priced = [choice.figures.tokens_per_dollar for choice in found]
    known = [rate for rate in priced if rate is not None]
    assert known == sorted(known, reverse=True) and priced[len(known) :] == [None, None]
    for choice in found:
        assert choice.a % 2 == 0 and choice.b <= shape.num_kv_heads
        assert choice.network_bytes_per_s == min(choice.a, choice.b) * 50e9
        assert choice.figures.required_bytes_per_s
    fast = rank_splits(shape, bf16, devices, CHAT, Slo(tpot_s=0.05), Budget())
    assert fast and all(choice.figures.step_s <= 0.05 for choice in fast)
    assert not rank_splits(shape, bf16, devices, CHAT, Slo(), Budget(dollars_per_h=5.0))
