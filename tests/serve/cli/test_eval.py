"""`serve eval` refuses invalid options before anything is computed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve import LLM
from serve.cli import quality as evaluation
from serve.cli.eval import parse_variant
from serve.cli.main import app
from serve.config import default_model_path
from serve.errors import ConfigError
from tests.support.engine.checkpoints import checkpoint
from tests.support.gguf.writer import write_gguf


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["eval", str(checkpoint("llama")), *arguments])


@pytest.fixture
def fail_on_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: object) -> None:
        pytest.fail(f"{config} was loaded")

    monkeypatch.setattr(evaluation, "load_runtime", load)


@pytest.mark.usefixtures("fail_on_load")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--json", "/nonexistent/table.json"), "--json /nonexistent/table.json cannot be written"),
        (("--json", "/tmp"), "--json /tmp cannot be written"),
        (("--precision", "float32", "--precision", "int5"), "dtype must be one of"),
        (("--precision", "float32", "--precision", "float32/int5"), "kv_dtype must be one of"),
        (("--kv-group", "3"), "kv_group"),
    ],
)
def test_invalid_options_are_refused_before_the_first_precision_runs(arguments, expected):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert expected in result.output.replace("\n", " ")


@pytest.mark.usefixtures("fail_on_load")
def test_an_unavailable_precision_is_refused_before_the_first_one_runs(monkeypatch):
    monkeypatch.setattr("ops.cpu.native_library.is_available", lambda: False)
    with pytest.raises(ConfigError, match="dtype int8 needs the native kernels"):
        evaluation.evaluate(
            str(checkpoint("llama")), "some text", [("float32", "auto"), ("int8", "auto")]
        )


def test_a_table_is_written(tmp_path):
    table = tmp_path / "table.json"
    arguments = ("--precision", "float32", "--max-tokens", "20", "--json", str(table))
    assert invoke(*arguments).exit_code == 0
    assert '"num_tokens": 19' in table.read_text()


def test_a_gguf_file_is_a_variant_of_a_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(default_model_path(), tmp_path / "copy.gguf", "llama")
    variants = [parse_variant(one) for one in ("float32", f"float32@{file}", "float32/int4")]
    plain, copy, _ = evaluation.evaluate("default", "Once upon a time", variants)
    assert copy.precision == f"copy: {plain.precision}" and copy.kl < 1e-6


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_kv_bytes_per_token_are_those_of_a_server(kv_dtype):
    (result,) = evaluation.evaluate("default", "Once upon a time", [("int8", kv_dtype)])
    with LLM(dtype="int8", kv_dtype=kv_dtype) as llm:
        assert llm.stats().kv_bytes_per_token == result.kv_bytes_per_token


def test_the_space_of_the_reference_is_allocated_first(tmp_path: Path):
    path = tmp_path / "reference.f32"
    table = evaluation._Store(path, 1000).rows(320)
    assert table.shape == (1000, 320)
    assert path.stat().st_blocks * 512 >= 4 * 1000 * 320


def test_a_full_disk_is_an_error_and_no_signal(monkeypatch):
    """A mapped file with holes would end the process with SIGBUS."""

    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    result = invoke("--precision", "float32", "--max-tokens", "20")
    assert result.exit_code == 2
    assert "max_tokens" in result.output and "TMPDIR" in result.output
