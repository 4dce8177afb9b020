"""`serve bench` and `serve plan` as commands: options to runs, files and exit codes."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bench.cli.measurements import measurements
from bench.common.cli_options import LOAD_OPTIONS
from bench.load.workload.online_options import OnlineOptions
from serve.cli.main import app
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import ServerThread

SIMULATED = ("bench", "llama-3.1-8b", "--simulate", "--max-model-len", "4096")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, terminal_width=200)


def said(result: Any) -> str:
    return re.sub(r"\s*\n[│ ]*", " ", result.output)


def test_help_names_every_measurement() -> None:
    group: Any = typer.main.get_command(measurements)
    text = said(invoke("bench", "--help"))
    for name in group.commands:
        assert re.search(rf"\b{name}\b", text), name
        assert invoke("bench", name, "--help").exit_code == 0, name


def test_every_option_of_a_load_is_offered() -> None:
    names = {item.name for item in fields(OnlineOptions)}
    assert names - {"model", "engine"} == set(LOAD_OPTIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "http://x", "--simulate"), "only one of url, in_process and simulate"),
        (("--url", "http://x", "--in-process"), "only one of url, in_process and simulate"),
        (("--machine", "h100-sxm"), "machine goes with simulate"),
        (("--server-model", "x"), "server_model goes with url"),
        (("--find-max-qps",), "find_max_qps needs an slo"),
        (("--slo", "chat", "--slo-from", "x"), "slo_from must be schedule or send"),
        (("--slo", "ttft=x"), "slo: 'ttft=x'"),
        (("--seeds", "0"), "seeds must be at least 1"),
        (("--arrival", "sometimes"), "arrival"),
        (("--dataset", "nothing"), "dataset must be one of"),
        (("--cancel-rate", "2"), "cancel_rate must be from 0 to 1"),
        (("--simulate", "--cancel-rate", "0.5"), "cancel_rate cannot be simulated"),
        (
            ("--url", "http://x", "--api-key-file", "/nowhere"),
            "api_key_file /nowhere cannot",
        ),
        (
            ("--simulate", "--find-max-qps", "--slo", "chat", "--qps", "1,2"),
            "needs exactly one qps",
        ),
        (("--html", "/nowhere/x.html"), "--html: there is no folder /nowhere"),
        (("llama-3.1-8b",), "llama-3.1-8b is a name of `serve plan`, which only --simulate takes"),
    ],
)
def test_what_cannot_be_asked_for(arguments: tuple[str, ...], message: str) -> None:
    result = invoke("bench", *arguments)
    assert message in said(result)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_key_is_used_and_written_nowhere(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("very-secret-key\n")
    files = [tmp_path / f"run.{kind}" for kind in ("json", "jsonl", "html")]
    with ServerThread(FakeEngine(step_s=0.001)) as server:
        result = invoke(
            *("bench", "--url", server.url, "--api-key-file", str(key), "--qps", "50"),
            *("--requests", "5", "--header", "X-Other: another-secret"),
            *(part for file in files for part in (f"--{file.suffix[1:]}", str(file))),
        )
    assert result.exit_code in (0, 3), result.output  # a slow machine makes a run invalid
    for text in (result.output, *(file.read_text() for file in files)):
        assert "very-secret-key" not in text and "another-secret" not in text
    assert len(files[1].read_text().splitlines()) == 5


def test_results_are_compared(tmp_path: Path) -> None:
    slow, fast = str(tmp_path / "slow.json"), str(tmp_path / "fast.json")
    load = ("--dataset", "azure-conv", "--requests", "200", "--qps", "4")
    assert invoke(*SIMULATED, *load, "--machine", "l4", "--json", slow).exit_code == 0
    assert invoke(*SIMULATED, *load, "--machine", "h200", "--json", fast).exit_code == 0
    document = json.loads(Path(slow).read_text())
    assert document["rates"][0]["qps"] == 4
    assert invoke("bench", "compare", slow, fast, "--fail-over", "10%").exit_code == 0
    assert invoke("bench", "compare", fast, slow, "--fail-over", "10%").exit_code == 3
    assert invoke("bench", "compare", fast, slow).exit_code == 0
    assert "needs at least two files" in said(invoke("bench", "compare", fast))


@pytest.mark.parametrize("limit", [("--usd-per-hour", "0.1"), ("--ttft", "1")])
def test_plan_that_nothing_keeps(limit: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("plan.png", "plan.json")]
    options = ("--png", str(files[0]), "--json", str(files[1]))
    result = invoke("plan", "llama-3.1-8b", *limit, *options)
    assert result.exit_code == 3 and "no machine serves this" in said(result)
    assert [file.exists() for file in files] == [False, True]


def test_tables_of_machines_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = invoke("plan").output.splitlines()
    rows = [line for line in lines if line.startswith("│")]
    assert all(line.endswith("│") for line in rows), "the last column is cut"
    assert "2xrtx-3090" in "".join(rows)
    assert "…" not in "".join(lines)


def test_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = invoke("plan", "llama-3.1-8b", "--tpot", "50", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "h100" in result.output and json.loads(file.read_text())
    assert invoke("plan").exit_code == 0
    known = invoke("plan", "--list")
    assert "llama-3.1-8b" in known.output and "h100-sxm" in known.output
    wrong = invoke("plan", "gpt-9")
    assert wrong.exit_code == 2 and "'gpt-9' is neither" in said(wrong)
    assert "batch must be whole numbers" in said(invoke("plan", "--batch", "1,x"))
    needed = "weights beyond memory need exactly one machine"
    assert needed in said(invoke("plan", "--disk-rate", "500M"))
    assert "link-rate must be above 0" in said(invoke("plan", "--link-rate", "0"))
    assert "host cannot be used with gpus" in said(invoke("plan", "--gpus", "8", "--host", "x"))
    assert "must be above 0" in said(invoke("plan", "--kv-offload-bytes", "0"))
