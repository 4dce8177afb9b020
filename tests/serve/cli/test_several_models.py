"""`serve run` with several models: which are served, by which names, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from serve.cli.run import run_command
from serve.cluster.models import start
from serve.cluster.models.listener import FrontPlan
from serve.cluster.models.settings import ModelsSettings
from serve.cluster.models.start import name_models, weight_file_bytes
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.http.edge.settings import HttpSettings
from serve.machine import local_kv_bytes

ONLY_RUN = typer.Typer(pretty_exceptions_enable=False)
ONLY_RUN.command()(run_command)
SECRET = "name:0123456789abcdef"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        (tmp_path / name).symlink_to(EngineConfig().model_path)
    (tmp_path / "other").mkdir()
    return tmp_path


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[FrontPlan, HttpSettings, ModelsSettings]]:
    """What would have been served."""
    calls: list[tuple[FrontPlan, HttpSettings, ModelsSettings]] = []

    def note(plan: FrontPlan, http: HttpSettings, settings: ModelsSettings, **_: Any) -> None:
        calls.append((plan, http, settings))

    monkeypatch.setattr(start, "serve_models", note)
    monkeypatch.setattr(start.uvloop, "run", lambda _: None)
    return calls


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(ONLY_RUN, arguments, env=env)
    return result.exit_code, result.output + result.stderr


def names(plan: FrontPlan) -> list[str]:
    return [each.spec.name for each in plan.models]


def test_arguments_and_directories(models: Path, served: Any) -> None:
    assert run(str(models / "b"), str(models / "a"))[0] == 0
    assert run(str(models))[0] == 0
    assert run("default", str(models / "c"))[0] == 0
    env = {"MERGESTEP_MORE_MODELS": f"{models / 'c'},{models / 'b'}"}
    assert run(str(models / "a"), env=env)[0] == 0
    expected = [["b", "a"], ["a", "b", "c"], ["mergestep-default", "c"], ["a", "c", "b"]]
    assert [names(plan) for plan, _, _ in served] == expected


def test_settings_of_the_models(models: Path, served: Any) -> None:
    given = ["--tls-cert", "x", "--port", "81", "--dtype", "float32", "--memory-budget", "1GiB"]
    code, output = run(str(models), *given, env={"MERGESTEP_API_KEY": SECRET})
    assert code == 0, output
    ((plan, http, settings),) = served
    assert (http.port, settings.memory_budget, plan.budget_bytes) == (81, 1 << 30, 1 << 30)
    assert plan.kv_bytes == int(0.4 * (1 << 30) / 3)
    spec = plan.models[0].spec
    lines = spec.settings.splitlines()
    assert 'dtype = "float32"' in lines and "port = 0" in lines and 'host = "127.0.0.1"' in lines
    assert 'served_model_name = "a"' in lines and not [x for x in lines if x.startswith("tls")]
    assert SECRET not in spec.settings and plan.key not in spec.settings
    assert spec.secrets["MERGESTEP_API_KEYS"] == f"{SECRET},mergestep-front:{plan.key}"
    assert spec.secrets["MERGESTEP_LOCAL_KV_BYTES"] == str(plan.kv_bytes)
    assert (
        plan.models[0].file_bytes
        == (EngineConfig().model_path / "model.safetensors").stat().st_size
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--served-model-name", "x"], "served_model_name is of one model, and 3 are to be served"),
        (["--metrics-port", "1"], "metrics_port is of one model"),
        (["--weights-listen", "shm:///tmp/w"], "weights_listen is of one model"),
        (["--memory-budget", "1MiB"], "memory_budget 1 MiB is too little"),
        (["--idle-seconds", "0"], "idle_seconds must be positive"),
        (["--model-wait-s", "inf"], "model_wait_s must be a positive number"),
        (["--max-model-waiting", "0"], "max_model_waiting must be positive"),
        (["--max-num-seqs", "0"], "max_num_seqs must be a positive integer"),
        (["--backend", "cuda"], "memory_budget: several models on a GPU need it"),
    ],
)
def test_wrong_settings(models: Path, served: Any, arguments: list[str], problem: str) -> None:
    code, output = run(str(models), *arguments)
    assert code == 2 and problem in " ".join(output.split()), output
    assert served == []


def test_two_models_of_one_name(models: Path, served: Any) -> None:
    code, output = run(str(models / "a"), str(models / "a"))
    assert code == 2 and "has the name a too; names must differ" in " ".join(output.split())
    code, output = run(str(models / "a"), str(models / "nothing"))
    assert code == 1 and "nothing" in output


def test_names() -> None:
    named = name_models([("/x/one", None), ("/x/two.gguf", None), ("/cache/abc", "Org/Three")])
    assert list(named) == ["one", "two", "Org/Three"]
    with pytest.raises(ConfigError, match="names must differ"):
        name_models([("/x/one", None), ("/y/one.gguf", None)])


def test_kv_memory_is_bounded_beside_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGESTEP_LOCAL_KV_BYTES", str(5 << 20))
    assert local_kv_bytes() == 5 << 20
    monkeypatch.delenv("MERGESTEP_LOCAL_KV_BYTES")
    assert local_kv_bytes() > 5 << 20


def test_bytes_of_files_in_parts(tmp_path: Path) -> None:
    for part, size in ((1, 10), (2, 20)):
        (tmp_path / f"m-0000{part}-of-00002.gguf").write_bytes(bytes(size))
    (tmp_path / "other.gguf").write_bytes(bytes(5))
    assert weight_file_bytes(str(tmp_path / "m-00001-of-00002.gguf")) == 30
    assert weight_file_bytes(str(tmp_path / "other.gguf")) == 5


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("serve.cluster.models.start", ("torch", "numpy", "serve.engine")),
        ("serve.cli.main", ("aiohttp", "uvloop", "serve.cluster.models.start", "torch")),
    ],
)
def test_nothing_heavy_is_imported(module: str, absent: tuple[str, ...]) -> None:
    """Neither in the front, nor of the front where one model is served."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(absent) & set(done.stdout.split())
