"""What requests get, what fits, which machine is best, and what `serve plan` prints."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest

from bench.common.plot_style import plain_log
from bench.plan.capacity import kv_bytes, max_sequences, max_tokens, sequence_bytes
from bench.plan.cost import Machine, MachineCost
from bench.plan.efficiency import BOUND, expected
from bench.plan.hardware import Device, Link, load_devices
from bench.plan.plots import curve
from bench.plan.run import run
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
from bench.plan.tables import dollars
from memory.attention.int8 import Int8KVLayout
from memory.pages.layer_groups import LayerGroup
from serve.config import EngineConfig, default_model_path
from serve.errors import ConfigError
from serve.loading.kv_sizing import size_kv
from serve.models import read_spec
from serve.scheduler.step_time import StepWork
from tests.support.engine.child import output_of

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
    """The embedded model's pages for 64 MiB of K/V, but for what pads a page."""
    spec = read_spec(default_model_path())
    layout = Int8KVLayout(spec.attention_layers, 64)
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
    """Two K/V heads on four devices: room of two of them."""
    two, four = (cost_of("h100-sxm", n, "qwen2.5-0.5b") for n in (2, 4))
    weights = two.shape.weight_bytes(INT8)
    assert kv_bytes(two) == pytest.approx(2 * 0.9 * 80e9 - weights)
    assert kv_bytes(four) == pytest.approx((4 * 0.9 * 80e9 - weights) / 2)


# ---- what requests get


def test_a_prompt_alone() -> None:
    """Chunks add up to the prompt, and the last one alone gives a token."""
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
    """As many prompt rows as answers' tokens ask for; a chunk is never longer than the SLO."""
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
    """More sequences: longer between tokens, more tokens a second."""
    points = curve(cost_of("l4"), CHAT)
    assert len(points) > 10
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(points))
    assert curve(cost_of("l4", model="llama-3.1-70b"), CHAT) == []


# ---- which machine


def ranked(slo: Slo = Slo(), budget: Budget = Budget(), **more: Device) -> list[Choice]:  # noqa: B008
    devices = {name: DEVICES[name] for name in ("l4", "h100-sxm", "rtx-5090", "epyc-9755")} | more
    return rank(LLAMA_8B, INT8, all_machines(devices), CHAT, slo, budget)


def test_the_cheapest_tokens_first() -> None:
    """Then machines without a price, the fastest first."""
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
    """Without fp8, with too little memory, too slow: each with its reason."""
    fp8 = Precision("fp8", "bfloat16")
    chosen = choose(LLAMA_8B, fp8, Machine(DEVICES["a100-80"]), CHAT, Slo())
    assert chosen.serving is None and chosen.reason == "a100-80 does not multiply fp8"
    reasons = {c.machine.name: c.reason for c in ranked(Slo(tpot_s=0.01))}
    assert reasons["epyc-9755"] == "tpot" and reasons["h100-sxm"] is None


def test_devices_share_heads() -> None:
    """Heads of K/V may be on several devices, those of q may not."""
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
    """More may be asked than is there, but never used."""
    found = []
    for rate in (1e9, 50e9):
        device = replace(DEVICES["h100-sxm"], network=Link(rate, 33e-6))
        found += rank_splits(LLAMA_8B, INT8, [device], CHAT, Slo(), Budget())
    slow, fast = found
    assert slow.used_bytes_per_s <= 1.001 * slow.network_bytes_per_s
    assert slow.used_bytes_per_s > 0.9 * slow.network_bytes_per_s
    assert (slow.figures.asked_bytes_per_s or 0.0) > slow.network_bytes_per_s
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
        assert choice.figures.asked_bytes_per_s
    fast = rank_splits(shape, bf16, devices, CHAT, Slo(tpot_s=0.05), Budget())
    assert fast and all(choice.figures.step_s <= 0.05 for choice in fast)
    assert not rank_splits(shape, bf16, devices, CHAT, Slo(), Budget(dollars_per_h=5.0))


# ---- the command


def test_one_machine_in_detail(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    found = run(
        "llama-3.1-8b", machines=["l4"], batches=[1, 256], contexts=[512, 4096], json_file=file
    )
    said = capsys.readouterr().out
    assert "llama-3.1-8b, 8.03B parameters, int8 (8.56 GB), K/V int8" in said
    assert "4,096 tokens" in said and "A prompt alone" in said
    written = json.loads(file.read_text())
    assert written == json.loads(json.dumps(found))
    cells = written["details"]["decode"]
    assert [(cell["batch"], cell["context"], cell["fits"]) for cell in cells] == [
        *((1, 512, True), (1, 4096, True), (256, 512, True), (256, 4096, False)),
    ]
    assert all(cell["bound_step_s"] < cell["step_s"] for cell in cells)
    assert [choice["machine"] for choice in written["machines"]] == ["l4"]


def test_weights_that_do_not_fit_have_no_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    found = run("llama-3.1-405b", machines=["l4"])
    said = capsys.readouterr().out
    assert "the weights do not fit" in said and "not (memory): l4" in said
    assert "Decode" not in said and "A prompt alone" not in said
    assert found["details"]["decode"] == found["details"]["prefill"] == []


def test_small_amounts_have_digits() -> None:
    amounts = (None, 0.0, 1234.5, 0.1, 0.0999, 0.023, 0.00456)
    shown = ["–", "0.00", "1,234.50", "0.10", "0.100", "0.023", "0.0046"]
    assert [dollars(amount) for amount in amounts] == shown


def test_all_machines_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = run("llama-3.1-8b", tpot_ms=50, top=3, disaggregated=True)
    said = capsys.readouterr().out
    assert len(found["machines"]) == 14 * 4 + 7
    assert "the cheapest answers first" in said and "not (tpot): " in said
    assert "the best (a, b) of each pair" in said and "details" not in found
    best_of = found["machines"][0]
    assert best_of["machine"] in said and best_of["serving"]["longest_s"] <= 0.05


def test_what_is_assumed_and_what_is_not_driven_is_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every figure of a GPU; no machine is ranked as if this software ran on it."""
    names = ["h100-sxm", "mi300x", "epyc-9755", "zen5-2vcpu"]
    found = run("llama-3.2-1b", machines=names, disaggregated=True)
    said = capsys.readouterr().out
    ranking, splits = said.split("Attention on memory devices")
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[3:9]]
        for line in ranking.splitlines()
        if len(cells := line.split("│")) > 9
    }
    assert set(rows) == {"h100-sxm †", "mi300x ‡", "epyc-9755", "zen5-2vcpu"}
    for name, (_, *figures) in rows.items():
        assert all(figure.startswith("~") != (name == "zen5-2vcpu") for figure in figures), name
    for meaning in ("~: assumed", "†: not driven yet", "never run on a GPU", "‡: not driven: "):
        assert meaning in ranking and meaning in splits
    backends = {choice["machine"]: choice["backend"] for choice in found["machines"]}
    assert backends["h100-sxm"] == "cuda" and backends["mi300x"] == "none"
    assumed = {choice["machine"] for choice in found["machines"] if choice["is_assumed"]}
    assert assumed == {"h100-sxm", "mi300x", "epyc-9755"}
    assert all(split["is_assumed"] for split in found["disaggregated"])


def test_one_machine_says_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    run("llama-3.2-1b", machines=["l4"])
    said = capsys.readouterr().out
    assert "on l4 † (" in said and "never run on a GPU" in said and "~: assumed" in said
    decode, prompt = said.split("Decode: ")[1].split("A prompt alone")
    cells = [cell for line in decode.splitlines() if "/s" in line for cell in line.split("│")[2:-1]]
    assert len(cells) >= 6 and all(cell.count("~") == 2 for cell in cells if "ms" not in cell)
    assert prompt.count("~") >= 6
    run("llama-3.2-1b", machines=["zen5-2vcpu"])
    said = capsys.readouterr().out
    assert "~" not in said and "†" not in said


def test_machines_by_name_and_number(capsys: pytest.CaptureFixture[str]) -> None:
    found = run("llama-3.1-70b", machines=["4xh100-sxm", "h200"], dtype="bfloat16")
    assert {c["machine"] for c in found["machines"]} == {"4xh100-sxm", "h200"}
    assert found["precision"]["kv"] == "bfloat16"
    assert "details" not in found and "h200" in capsys.readouterr().out


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    run("default", machines=["l4"], prompt=100, output=50, png_file=file, tpot_ms=5)
    assert file.read_bytes().startswith(b"\x89PNG") and "l4" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"png .*none/plan.png: No such file"):
        run("default", machines=["l4"], prompt=100, output=50, png_file=tmp_path / "none/plan.png")


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        ((25, 150), ["30", "40", "60", "80", "100"]),
        ((60, 60_000), ["100", "200", "500", "1,000", "2,000", "5,000"]),
    ],
)
def test_numbers_of_an_axis(limits: tuple[float, float], shown: list[str]) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    axes.set(xscale="log", xlim=limits)
    plain_log(axes.xaxis, most=2000)
    ticks = [float(x) for x in axes.get_xticks() if limits[0] <= x <= limits[1]]
    texts = axes.xaxis.get_major_formatter().format_ticks(ticks)
    assert texts[: len(shown)] == shown


def test_torch_is_not_needed() -> None:
    code = (
        "import sys; from bench.plan.run import run; run('qwen3-8b'); print('torch' in sys.modules)"
    )
    assert output_of("-c", code).splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"model": "llama-9"}, "model 'llama-9' is neither a directory"),
        ({"dtype": "int2"}, "dtype 'int2' is not one of: float32, bfloat16, int8, fp8, int4, nf4"),
        ({"kv_dtype": "fp8"}, "kv_dtype 'fp8' is not one of: auto, float32, bfloat16, int8"),
        ({"prompt": 0}, "prompt must be at least 1, not 0"),
        ({"output": 1000}, "prompt 1024 and output 1000 are more than the 1024 tokens of default"),
        ({"prompt": 10, "contexts": [2000]}, "context 2000 leaves no room for a token in the 1024"),
        ({"batches": [1, 0]}, "batch must be at least 1, not 0"),
        ({"batches": []}, "batch must name at least one number"),
        ({"tpot_ms": 0.0}, "tpot must be above 0, not 0.0"),
        ({"usd_per_h": -1.0}, "usd-per-hour must be above 0, not -1.0"),
        ({"machines": ["h300"]}, "machine 'h300' is neither here nor one of: a100-40, "),
        (
            {"machines": ["3xl4"]},
            "machine '3xl4': 4 heads, 2 of K/V, are not divisible between 3 devices",
        ),
        ({"machines": [""]}, "machine '' is neither here nor one of: "),
        ({"machines": ["2xgraviton4"]}, "machine '2xgraviton4': graviton4 has no peers"),
        ({"json_file": Path("/none/x.json")}, "json /none/x.json: No such file"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], complaint: str) -> None:
    given = {"model": "default", "prompt": 500, "output": 100} | options
    if "output" in options:
        given["prompt"] = 1024
    with pytest.raises(ConfigError) as error:
        run(given.pop("model"), **given)
    assert complaint in str(error.value)
