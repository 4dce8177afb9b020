"""`serve eval --kv-policy`: refusals before anything runs, the table, the file and the picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench.quality import measure, train
from bench.quality.measure import BUDGETS, Row, all_policies
from bench.quality.network import Network, Shape
from bench.quality.picture import draw, lines_of
from bench.quality.policies import POLICIES
from bench.quality.tasks import ACCURACIES
from serve.cli import eval as evaluation
from serve.cli.main import app
from serve.errors import ConfigError
from tests.support.engine.checkpoints import checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    network = Network(Shape(num_hidden_layers=2))
    train.initialize(network)
    train.write_checkpoint(network, directory)
    return directory


def invoke(model: Path | str, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", str(model), *arguments])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--kv-policy", "best"), "must be all or one of window, h2o"),
        (("--kv-policy", "quest:budget=0"), "budget"),
        (("--kv-policy", "quest:size=5"), "budget"),
        (("--kv-policy", "full:budget=5"), "must be all or one of"),
        (("--kv-policy", "all", "--context", "100"), "context must be between 1024 and 7936"),
        (("--kv-policy", "all", "--context", "8192"), "context must be between 1024 and 7936"),
        (("--kv-policy", "all", "--exercises", "0"), "exercises must be at least 1"),
        (("--kv-policy", "all", "--json", "/nonexistent/x"), "--json /nonexistent/x cannot be"),
        (("--kv-policy", "all", "--png", "/nonexistent/x"), "--png /nonexistent/x cannot be"),
        (("--kv-policy", "all", "--seed", "-1"), "seed must be at least 0"),
        *(
            (("--kv-policy", "all", *given.split()), f"{given.split()[0]} cannot be used with")
            for given in (
                "--precision int8",
                "--text file",
                "--max-tokens 5",
                "--window 512",  # the default
                "--weight-group 32",
                "--kv-group 7",
                "--tokenizer folder",
                "--revision main",
            )
        ),
        *(
            (tuple(given.split()), f"{given.split()[0]} needs --kv-policy")
            for given in (
                "--png x.png",
                "--reference",
                "--exercises 5",
                "--context 4096",  # the default
                "--seed 1",
            )
        ),
    ],
)
def test_invalid_options_are_refused(model, arguments, expected, monkeypatch):
    monkeypatch.setattr(measure, "by_engine", lambda *_: pytest.fail("an engine started"))
    monkeypatch.setattr(measure, "by_reference", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(evaluation, "run_eval", lambda *_, **__: pytest.fail("it ran"))
    result = invoke(model, *arguments)
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())


def test_other_models_do_not_know_the_words():
    result = invoke(checkpoint("llama"), "--kv-policy", "quest")
    assert result.exit_code == 2
    assert "does not know the words of the tasks" in " ".join(result.output.split())


def test_a_model_that_does_not_exist_is_said_so(tmp_path):
    result = invoke(tmp_path / "missing", "--kv-policy", "quest")
    assert result.exit_code == 1, "as that of other commands"
    assert "missing does not exist" in "".join(result.output.split("\n"))
    assert "is no model of K/V policies" in invoke(tmp_path, "--kv-policy", "quest").output


@pytest.mark.exhaustive
def test_a_table_a_file_and_a_picture_are_written(model, tmp_path):
    file, picture = tmp_path / "table.json", tmp_path / "picture.png"
    options = ("--reference", "--context", "1024", "--exercises", "1")
    files = ("--json", str(file), "--png", str(picture))
    policies = ("--kv-policy", "quest:budget=12%", "--kv-policy", "window:budget=64")
    result = invoke(model, *policies, *options, *files)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["full", "quest:budget=12%", "window:budget=64"]
    full, quest, window = rows
    assert full["held"] == full["read"] == quest["held"] == 1.0
    assert quest["read"] == pytest.approx(0.12, abs=0.01) and window["held"] < 0.11
    assert full["kv_bytes"] == 1280 * 2 * 2 * 2 * 32 * 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_name_stands_for_all_budgets():
    assert all_policies(["quest", "h2o:budget=7,least=1", "quest:budget=6%"]) == [
        "full",
        *(f"quest:budget={budget}" for budget in BUDGETS),
        "h2o:budget=7,least=1",
    ]
    assert len(all_policies(["all"])) == 1 + (len(POLICIES) - 1) * len(BUDGETS)
    with pytest.raises(ConfigError, match="must be all or one of"):
        all_policies(["none"])


def test_lines_rise_with_the_budget(tmp_path):
    def row(policy: str) -> Row:
        accuracy = dict.fromkeys(ACCURACIES, 0.5)
        return Row(policy, accuracy, 2.0, 1.0, 1.0, 1.0, math.nan)

    rows = [row(one) for one in ("full", "h2o:budget=50%", "h2o:budget=6%", "h2o:budget=64")]
    lines = lines_of(rows)
    assert [budget for budget, _ in lines["h2o"]] == [6.0, 50.0]
    draw(tmp_path / "x.png", rows, "title")
    assert (tmp_path / "x.png").stat().st_size > 10_000
