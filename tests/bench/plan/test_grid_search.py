"""`serve plan --gpus`: which grids are found, why others fail, and which options are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli.plan import NOT_SERVED
from bench.plan.efficiency import expected
from bench.plan.grid import Grid, decode_work
from bench.plan.grid_run import run_grids
from bench.plan.grid_search import GridSearch, LongPrompt, device_bytes, kv_bytes_of
from bench.plan.hardware import load_devices
from bench.plan.pipeline import fixed_chunks, prefill
from bench.plan.quantities import parse_seconds, parse_token_list, parse_tokens
from bench.plan.shapes import Precision, load_shape
from serve.cli.main import app
from serve.errors import ConfigError

PRECISION = Precision("bfloat16", "bfloat16")


def search(num_gpus: int, model: str = "llama-3.1-8b") -> GridSearch:
    device, shape = load_devices()["h100-sxm"], load_shape(model)
    return GridSearch(shape, PRECISION, device, expected("gpu", PRECISION), num_gpus=num_gpus)


def test_grids_divide_the_heads_and_layers_within_the_gpus() -> None:
    grids = set(search(16).grids(1_000_000))
    assert {grid.tp for grid in grids} == {1, 2, 4, 8}
    assert max(grid.num_devices for grid in grids) == 16
    # with 32 layers, 9 or 10 stages have as large a one as 8 have
    assert {grid.spp for grid in grids if grid.tp == 1} == {1, 2, 3, 4, 5, 6, 7, 8, 11, 16}
    assert {grid.kvp for grid in grids if (grid.tp, grid.spp) == (4, 1)} == {1, 2, 3, 4}
    assert {grid.kvp for grid in search(16).grids(9000)} == {1, 2}


def test_memory_of_the_fullest_device() -> None:
    """Two stages of 16 layers on two devices each; the last one has the head."""
    cost = search(8).cost(Grid(2, 2, 2), 1_000_000)
    shape = cost.shape
    layers = (2 * shape.block_parameters + 4 * shape.other_parameters) / 2
    kv = 500_000 * 32 * 2 * 8 * 128 * 2 / 2
    head = 2 * 4096 * 128256
    assert device_bytes(cost, 1_000_000) == pytest.approx((layers + kv + head) / 2)


def test_room_for_kv_is_what_fills_the_fullest_device() -> None:
    cost = search(16).cost(Grid(2, 4, 2), 1_000_000)
    tokens = kv_bytes_of(cost) / cost.shape.kv_token_bytes(PRECISION)
    # the last stage, which has the head, is the fullest one
    full = device_bytes(search(16).cost(Grid(2, 4, 2), int(tokens)), int(tokens))
    assert full == pytest.approx(0.9 * 80e9, rel=1e-4)
    assert kv_bytes_of(search(1, "llama-3.1-70b").cost(Grid(), 1000)) < 0


def test_every_choice_is_where_its_figures_say() -> None:
    prompt = LongPrompt(context=1_000_000, ttft_s=30.0, tbt_s=12e-3)
    choices = search(32).choices(prompt)
    for choice in choices:
        if choice.reason is None:
            assert choice.ttft_s <= 30 and choice.tbt_s <= 12e-3
        assert (choice.memory_bytes > choice.room_bytes) == (choice.reason == "memory")
        assert choice.reason != "ttft" or choice.ttft_s > 30
        assert choice.reason != "tbt" or choice.tbt_s > 12e-3
    assert {choice.reason for choice in choices} == {None, "memory", "ttft", "tbt"}
    served = [choice for choice in choices if choice.reason is None]
    assert choices[: len(served)] == served
    gpus = [choice.grid.num_devices for choice in served]
    assert gpus == sorted(gpus) and gpus[0] < 32


def test_what_is_shown_is_exact_and_not_beaten_by_another() -> None:
    prompt, found = LongPrompt(context=1_000_000, ttft_s=30.0, tbt_s=30e-3), search(32)
    shown, is_served = found.best(found.choices(prompt), prompt, 5)
    assert is_served and 1 < len(shown) <= 5
    for one in shown:
        cost = found.cost(one.grid, 1_000_000)
        assert one.ttft_s == prefill(cost, 1_000_000, fixed_chunks(4096)).seconds <= 30
        assert one.tbt_s == cost.pass_seconds(decode_work(1_000_000)) <= 30e-3
        assert one.ttft_s <= one.shared_ttft_s < inf
        for other in shown:
            assert one is other or (
                one.grid.num_devices < other.grid.num_devices
                or one.ttft_s < other.ttft_s
                or one.tbt_s < other.tbt_s
            )


def test_more_gpus_are_never_slower() -> None:
    prompt = LongPrompt(context=500_000)
    fastest = [search(number).choices(prompt)[0].ttft_s for number in (8, 16, 32)]
    assert fastest == sorted(fastest, reverse=True)


def test_without_limits_the_fastest_comes_first() -> None:
    prompt = LongPrompt(context=100_000)
    choices = search(8).choices(prompt)
    assert all(choice.reason is None for choice in choices)
    assert choices[0].ttft_s == min(choice.ttft_s for choice in choices)


def test_devices_without_links_are_refused_by_name() -> None:
    lonely = replace(load_devices()["rtx-3090"], peers=None)
    shape = load_shape("llama-3.1-8b")
    found = GridSearch(shape, PRECISION, lonely, expected("gpu", PRECISION), num_gpus=2)
    (only,) = found.choices(LongPrompt(context=1000))
    assert only.grid == Grid()


def test_the_report_of_a_search(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "grids.json"
    result = run_grids(
        "llama-3.1-8b",
        num_gpus=32,
        context=1_000_000,
        ttft_s=30.0,
        tbt_s=30e-3,
        dtype="bfloat16",
        top=3,
        json_file=file,
    )
    said = capsys.readouterr().out
    assert "the fewest GPUs first" in said and "not (ttft): " in said and "~: assumed" in said
    assert "made for 131,072 tokens" in said
    written = json.loads(file.read_text())
    assert written == json.loads(json.dumps(result)) and written["is_served"]
    assert len(written["shown"]) <= 3 and written["shown"][0]["reason"] is None
    assert written["shown"][0]["num_gpus"] <= 32


def test_no_grid_keeps_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    """Attention over 10 M tokens takes minutes on 128 GPUs; the report says how many it needs."""
    result = run_grids("llama-3.1-8b", num_gpus=32, context=10_000_000, ttft_s=30.0, top=1)
    said = " ".join(capsys.readouterr().out.split())
    assert not result["is_served"] and "The nearest grids" in said and "misses" in said
    assert "the nearest misses ttft" in said and "30 s need at least 1,4" in said
    result = run_grids("llama-3.1-70b", num_gpus=2, context=10_000_000, tbt_s=0.1)
    said = capsys.readouterr().out
    assert not result["is_served"] and "the memory of 2 GPUs does not hold this" in said
    assert "not (memory): " in said


@pytest.mark.exhaustive
def test_a_time_between_tokens_asks_for_grids() -> None:
    """Without --gpus their number is assumed, and ttft is in seconds as with it."""
    done = CliRunner().invoke(
        app, ["plan", "--context", "10M", "--ttft", "30", "--tbt", "30ms", "--top", "1"]
    )
    said = " ".join(done.output.split())
    assert done.exit_code == 0, said
    assert "--gpus is not given: grids of up to 128 GPUs" in said
    assert "10 M tokens on up to 128 h100-sxm" in said and "30.1 s to the first token" in said
    assert " pp " in said and "spp" not in said


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("131072", 131_072), ("10M", 10_000_000), ("128K", 128_000), ("1.5m", 1_500_000)],
)
def test_numbers_of_tokens(text: str, tokens: int) -> None:
    assert parse_tokens("context", text) == tokens
    assert parse_token_list("context", f"1,{text}") == [1, tokens]


@pytest.mark.parametrize("text", ["", "1.5", "-3", "10G", "M", "0", "1e6"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(ConfigError, match="context must be a number of tokens"):
        parse_tokens("context", text)


def test_times() -> None:
    assert parse_seconds("tbt", "30ms") == pytest.approx(0.03)
    assert parse_seconds("tbt", "0.03") == parse_seconds("tbt", "0.03s") == 0.03
    assert parse_seconds("ttft", "2000", "ms") == parse_seconds("ttft", "2s", "ms") == 2.0
    assert parse_seconds("ttft", None) is None
    for text in ("0", "-1", "30 minutes", "ms", "inf"):
        with pytest.raises(ConfigError, match="ttft must be a time"):
            parse_seconds("ttft", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpus 4 --tpot 30", "tpot cannot be used with gpus (which has tbt)"),
        ("--gpus 4 --prompt 30", "prompt cannot be used with gpus"),
        ("--gpus 4 --disaggregated", "disaggregated cannot be used with gpus"),
        ("--gpus 0", "gpus must be from 1 to 4096, not 0"),
        ("--gpus 4 --gpus-per-server 0", "gpus-per-server must be from 1 to 1024, not 0"),
        ("--gpus 4 --context 1.5", "context must be a number of tokens"),
        ("--gpus 4 --ttft soon", "ttft must be a time"),
        ("--gpus 4 --machine 4xl4", "machine '4xl4' is not one of"),
        ("--gpus 4 --machine l4 --machine a10", "machine: gpus are of one kind"),
        ("--gpus 4 --top 0", "top must be at least 1"),
        ("--tbt 30ms --tpot 30", "tpot cannot be used with gpus"),
        ("--gpus-per-server 0", "gpus-per-server must be from 1 to 1024, not 0"),
    ],
)
def test_options_that_are_refused(options: str, message: str) -> None:
    done = CliRunner().invoke(app, ["plan", *options.split()])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_the_command() -> None:
    """A bare number of --ttft is in seconds with --gpus, and in milliseconds without."""
    words = "plan llama-3.2-1b --context 128K --ttft 30 --tbt 30ms --gpus"
    done = CliRunner().invoke(app, [*words.split(), "8"])
    assert done.exit_code == 0 and "the fewest GPUs first" in done.output
    words = "plan llama-3.2-1b --gpus 8 --context 1M --ttft 30ms"
    assert CliRunner().invoke(app, words.split()).exit_code == NOT_SERVED
    done = CliRunner().invoke(
        app, ["plan", "llama-3.2-1b", "--machine", "l4", "--ttft", "30", "--context", "1K"]
    )
    assert done.exit_code == NOT_SERVED and "not (ttft): l4" in done.output
