"""What `serve plan` prints and writes, and which options it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.cli.plan import NOT_SERVED
from bench.common.plot_style import plain_log
from bench.plan.run import run
from bench.plan.tables import dollars
from serve.cli.main import app
from serve.errors import ConfigError
from tests.support.engine.child import output_of


def test_one_machine_in_detail(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    found = run(
        "llama-3.1-8b", machines=["l4"], batches=[1, 256], contexts=[512, 4096], json_file=file
    )
    said = capsys.readouterr().out
    assert "llama-3.1-8b, 8.03B parameters, int8 (8.56 GB), K/V int8" in said
    assert said.count("✗") == 2  # a cell and what the mark means
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
    found = run("llama-3.1-405b", machines=["2xl4"])
    said = capsys.readouterr().out
    assert "the weights do not fit" in said and "not (memory): 2xl4" in said
    assert "Decode" not in said and "A prompt alone" not in said
    assert found["details"]["decode"] == found["details"]["prefill"] == []


def test_weights_beyond_memory_are_an_answer_unless_a_bound_is_asked() -> None:
    def plan(*options: str) -> tuple[int, str]:
        command = ["plan", "llama-3.1-70b", "--machine", "rtx-4090", *options]
        done = CliRunner().invoke(app, command)
        return done.exit_code, done.output

    code, said = plan()
    assert code == 0 and "Weights beyond the device, beside ryzen-9950x" in said
    assert "do not fit" not in said and "no machine serves this" not in said
    for bound in ("--tpot", "--ttft", "--usd-per-hour", "--usd-per-million"):
        code, said = plan(bound, "100000")
        assert code == NOT_SERVED and "not (memory): rtx-4090" in said
        assert "Weights beyond the device" in said
    code, said = plan("--machine", "l4")
    assert code == NOT_SERVED and "Weights beyond" not in said


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
    """Every figure of a GPU has a mark, and machines that the software does not drive have one."""
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
