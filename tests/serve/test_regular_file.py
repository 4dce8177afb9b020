"""What stands in a file's place and is no regular file is refused at once, by its path."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.load.results.document import read_json
from bench.load.workload import text_files, traces
from bench.plan.calibrate import FittedCost
from bench.plan.hardware import read_toml
from serve.cli.client_key import read_client_key
from serve.cli.config_file import read_config_file
from serve.cli.main import app
from serve.config import EngineConfig
from serve.engine.loader import load_engine
from serve.errors import ConfigError, ModelLoadError, reason
from serve.http.edge.keys import load_keys
from serve.http.edge.settings import HttpSettings
from serve.http.edge.tls import tls_context
from serve.hub.cache import cached_models
from serve.loading.node_key import read_key, read_key_file
from serve.regular_file import open_regular
from tests.support.engine.checkpoints import checkpoint, edit_json


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_kinds_of_files(fifo: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    (tmp_path / "link").symlink_to(fifo)
    kinds = {fifo: "FIFO", tmp_path / "link": "FIFO", tmp_path / "socket": "socket"}
    kinds |= {tmp_path: "directory", Path("/dev/zero"): "device"}
    for path, kind in kinds.items():
        with pytest.raises(OSError, match=f"it is a {kind}, not a regular file") as caught:
            open_regular(path)
        assert reason(caught.value) == f"it is a {kind}, not a regular file"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "gone")
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "file-link").symlink_to("file")
    with open_regular(tmp_path / "file-link") as file:
        assert file.read() == b"text"


def test_a_path_with_a_nul_is_refused_by_its_setting() -> None:
    with pytest.raises(OSError, match="a path has no NUL"):
        open_regular("a\0b")
    for setting in ("memory_node_key_file", "kv_peer_key_file"):
        with pytest.raises(ConfigError, match=f"{setting} a\0b: a path has no NUL"):
            read_key_file("a\0b", setting)
    with pytest.raises(ConfigError, match="a path has no NUL"):
        load_keys("a\0b")


CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "SHA256SUMS",
)


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
@pytest.mark.row("X3")
def test_a_fifo_in_a_checkpoint(name: str, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(ModelLoadError, match="it is a FIFO, not a regular file") as caught:
        load_engine(EngineConfig(model=str(path)))
    assert str(path / name) in str(caught.value)


@pytest.mark.parametrize("name", ["tekken.json", "qwen.tiktoken", "tiktoken.model"])
@pytest.mark.row("X3")
def test_a_fifo_of_ranks(name: str, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    (path / "tokenizer.json").unlink()
    edit_json(
        path / "tokenizer_config.json",
        lambda values: values.update(
            tokenizer_class="TikTokenTokenizer" if name == "tiktoken.model" else "QWenTokenizer"
        ),
    )
    os.mkfifo(path / name)
    with pytest.raises(ModelLoadError, match="it is a FIFO, not a regular file") as caught:
        load_engine(EngineConfig(model=str(path)))
    assert str(path / name) in str(caught.value)


@pytest.mark.row("X3")
def test_a_device_as_tokenizer_model(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.model").symlink_to("/dev/zero")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model: it is a device"):
        load_engine(EngineConfig(model=str(path)))


@pytest.mark.row("X3")
def test_a_fifo_as_model(fifo: Path) -> None:
    with pytest.raises(ModelLoadError, match="neither a directory nor a file"):
        load_engine(EngineConfig(model=str(fifo)))


READERS: dict[str, Callable[[str], object]] = {
    "config": read_config_file,
    "api_key_file": load_keys,
    "client's key": lambda path: read_client_key(Path(path)),
    "memory_node_key_file": lambda path: read_key(EngineConfig(memory_node_key_file=path)),
    "tls_cert": lambda path: tls_context(HttpSettings(tls_cert=path, tls_key=path)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_fifo_as_setting(name: str, fifo: Path) -> None:
    with pytest.raises(ConfigError, match=r"regular file|is not a file") as caught:
        READERS[name](str(fifo))
    assert str(fifo) in str(caught.value)


def test_a_fifo_as_text_of_an_evaluation(fifo: Path) -> None:
    result = CliRunner().invoke(app, ["eval", "--text", str(fifo)])
    assert result.exit_code == 2
    assert f"--text {fifo}: it is a FIFO, not a regular file" in result.stderr


BENCH_READERS: dict[str, Callable[[Path], object]] = {
    "trace": lambda path: list(traces.lines(path)),
    "conversations": text_files._json_list,
    "result": read_json,
    "fitted cost": FittedCost.load,
    "hardware": lambda path: read_toml(path, "hardware"),
}


@pytest.mark.parametrize("name", BENCH_READERS)
@pytest.mark.parametrize("kind", ["FIFO", "device", "directory"])
def test_what_a_measurement_reads(name: str, kind: str, fifo: Path, tmp_path: Path) -> None:
    path = {"FIFO": fifo, "device": Path("/dev/zero"), "directory": tmp_path}[kind]
    with pytest.raises(ConfigError, match=f"{path}: it is a {kind}, not a regular file"):
        BENCH_READERS[name](path)


def test_a_fifo_in_the_cache_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the version is read without waiting; the version that is there counts."""
    snapshot = tmp_path / "models--A--x" / "snapshots" / "1"
    shutil.copytree(checkpoint("llama"), snapshot)
    (tmp_path / "models--A--x" / "refs").mkdir()
    os.mkfifo(tmp_path / "models--A--x" / "refs" / "main")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert cached_models() == {"A/x": snapshot}
