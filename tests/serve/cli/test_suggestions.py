"""A misspelt option, command, measurement or model with random weights: the nearest is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.common.checkpoints import SHAPES
from serve.cli.main import app


def output_of(*arguments: str) -> str:
    """Returns the output of a command that exits with code 2, without the frame and its breaks."""
    result = CliRunner().invoke(app, list(arguments), terminal_width=200)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --prot 8000", "No such option: --prot; did you mean --port?"),
        ("run --prot=8000", "No such option: --prot; did you mean --port?"),
        ("run --no-prefix-cash", "--no-prefix-cash; did you mean --no-prefix-cache?"),
        ("node --thread 2", "--thread; did you mean --threads?"),
        ("bench --qpss 2", "--qpss; did you mean --qps?"),
        ("bench latency --bach 2", "--bach; did you mean --batch?"),
        ("--versoin", "--versoin; did you mean --version?"),
        ("run --model x", "--model; give it without an option: serve run MODEL"),
        ("chat --modle x", "--modle; give it without an option: serve chat MODEL"),
        ("run --tool-call-parser hermes", "--tool-call-parser; use --tool-parser"),
        ("run --enable-auto-tool-choice", "leave it out: tools are always on"),
        ("run --gpu-memory-utilization 0.9", "use --kv-cache-bytes, a size such as 8GiB"),
        ("run --tool-parser hermess", "not 'hermess'; did you mean hermes?"),
        ("run --reasoning-parser qwen-3", "not 'qwen-3'; did you mean qwen3?"),
        ("run --xyzzy", "No such option: --xyzzy"),
        ("rnu", "No such command 'rnu'. Did you mean 'run'?"),
        ("bench latencyy", "model 'latencyy'; did you mean `serve bench latency`?"),
        ("bench nodes equalty", "any of equality, capacity"),
    ],
)
def test_a_misspelt_name(arguments: str, message: str) -> None:
    assert message in output_of(*arguments.split())


def test_a_name_that_resembles_none_has_no_suggestion() -> None:
    assert "did you mean" not in output_of("run", "--xyzzy")


@pytest.mark.parametrize("command", ["run", "chat", "eval", "bench", "bench latency"])
def test_an_unknown_shape_of_random_weights(command: str) -> None:
    output = output_of(*command.split(), "random:llama-9b")
    assert "model 'random:llama-9b' is unknown" in output
    assert all(f"random:{shape}" in output for shape in SHAPES)
    assert output.endswith("did you mean random:llama-8b?")


def test_a_model_with_random_weights_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["chat", "random:tiny", "-m", "hi", "--max-tokens", "2"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "mergestep" / "random-tiny" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("command", "codes"),
    [
        ("", (0, 1, 2, 3, 130)),
        ("bench", (0, 1, 2, 3, 130)),
        ("chat", (0, 1, 2, 130)),
        ("run", (0, 1, 2, 143)),
    ],
)
def test_the_help_lists_the_exit_codes(command: str, codes: tuple[int, ...]) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"], terminal_width=200)
    text = " ".join(result.output.partition("Exit code")[2].split())
    assert tuple(map(int, re.findall(r"\b(\d+): ", text))) == codes
