"""The commands that fetch models, from nothing to an answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from aiohttp import web
from typer.testing import CliRunner

from bench.common.checkpoints import model_directory
from serve.cli.main import app
from tests.support.http.serve_process import serve_run
from tests.support.hub.models import WEIGHTS, llama_files, plain_files
from tests.support.hub.server import TOKEN, FakeHub, Fault, Sent

QUANTS = {"m-Q4_K_M.gguf": b"4" * 2048, "m-Q8_0.gguf": b"8" * 1024, "README.md": b""}


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_pull(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", plain_files())
    code, out, err = run("pull", "Org/Model")
    snapshot = cache / "models--Org--Model" / "snapshots" / ("a" * 40)
    assert (code, out) == (0, f"{snapshot}\n")
    assert f"downloading Org/Model from {hub.url}: 3 MiB in 3 files, to {cache}" in err
    assert run("pull", "Org/Model") == (0, f"{snapshot}\n", "")


def test_pull_of_a_quantization(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/M-GGUF", dict(QUANTS))
    code, out, err = run("pull", "Org/M-GGUF:q8_0", "--quiet")
    assert (code, err) == (0, "") and out.endswith("m-Q8_0.gguf\n")
    assert Path(out.strip()).read_bytes() == QUANTS["m-Q8_0.gguf"]
    code, _, err = run("pull", "Org/M-GGUF:Q2_K")
    assert code == 1 and "none matches 'Q2_K'" in err and "Org/M-GGUF:Q4_K_M  2 KiB" in err


def test_pull_offline_says_where_the_model_is(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("Org/Model", plain_files())
    _, path, _ = run("pull", "Org/Model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = len(hub.seen)
    assert run("pull", "Org/Model") == (0, path, "")
    assert run("pull", "Org/Other")[0] == 1 and len(hub.seen) == before


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("pull", "Org/Gone"), 1, "has no model Org/Gone, or it is private"),
        (("pull", "./Org/Model"), 2, "is not the name of a model on the hub"),
        (("pull", "Org/Model", "--revision", "a b"), 2, "is not the name of a branch"),
        (("run", "Org/Gone"), 1, "Org/Gone does not exist here, and 127.0.0.1"),
        (("run", "--revision", "v1"), 2, "revision v1: only models by their names"),
        (("run", "random:tiny", "--revision", "v1"), 2, "revision v1: only models by"),
        (("chat", "Org/Gone", "-m", "hi"), 1, "Org/Gone does not exist here"),
        (("eval", "Org/Gone"), 1, "Org/Gone does not exist here"),
        (("bench", "Org/Gone"), 1, "Org/Gone does not exist here"),
        (("bench", "latency", "Org/Gone"), 1, "Org/Gone does not exist here"),
    ],
)
def test_errors(
    hub: FakeHub, cache: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    found, _, err = run(*arguments)
    assert found == code and text in err and "Traceback" not in err


def test_the_token_of_the_environment(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("Org/Model", plain_files(), access="gated")
    code, _, err = run("pull", "Org/Model")
    assert code == 1 and "Org/Model is gated: ask for access at" in err
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, out, err = run("pull", "Org/Model")
    assert code == 0 and TOKEN not in out + err


def test_the_token_of_a_login(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", plain_files(), access="private")
    cache.parent.mkdir(exist_ok=True)
    (cache.parent / "token").write_text(f"{TOKEN}\n")
    assert run("pull", "Org/Model")[0] == 0


def test_from_nothing_to_an_answer(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", llama_files())
    code, out, err = run("chat", "Org/Model", "-m", "hi", "--max-tokens", "2")
    assert code == 0 and out.strip() and "downloading Org/Model from" in err
    before = len(hub.seen)
    again = run("chat", "Org/Model", "-m", "hi", "--max-tokens", "2", "--temperature", "0")
    assert again[0] == 0 and "downloading" not in again[2] and len(hub.seen) == before


def test_models_lists_the_cache_with_formats_and_sizes(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/M-GGUF", dict(QUANTS))
    hub.add("Org/Model", llama_files())
    for name in ("Org/M-GGUF:Q4_K_M", "Org/M-GGUF:Q8_0", "Org/Model"):
        assert run("pull", name, "-q")[0] == 0
    code, out, _ = run("models", "--json")
    listed = {model["name"]: model for model in json.loads(out)}
    assert code == 0
    assert list(listed) == ["default", "Org/M-GGUF:Q4_K_M", "Org/M-GGUF:Q8_0", "Org/Model"]
    four = listed["Org/M-GGUF:Q4_K_M"]
    assert (four["format"], four["size_bytes"]) == ("GGUF Q4_K_M", 2048)
    assert four["path"].endswith("m-Q4_K_M.gguf")
    model = listed["Org/Model"]
    assert model["format"] == "safetensors" and model["max_tokens"] and not model["problem"]
    out = run("models")[1]
    assert "GGUF Q8_0" in out and "2 KiB" in out


def test_models_of_a_folder_with_gguf_files(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"x" * 10)
    for where in (tmp_path, tmp_path / "a-Q4_0.gguf"):
        models = json.loads(run("models", "--json", str(where))[1])
        assert models[0]["name"] == str(tmp_path / "a-Q4_0.gguf")
        assert [model["size_bytes"] for model in models] == [10, 20][: len(models)]


def test_benchmarks_take_names(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", plain_files())
    assert model_directory("Org/Model") == str(
        cache / "models--Org--Model" / "snapshots" / ("a" * 40)
    )


def test_nothing_is_imported_that_is_not_used() -> None:
    code = (
        "import sys, serve, serve.cli.main; serve.cli.main.find_model('default');"
        "print([name for name in ('huggingface_hub', 'httpx', 'httpx2', 'torch', 'aiohttp')"
        " if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def slowly(chunk: int, pause_s: float) -> Fault:
    """Returns a fault that sends weights in chunks with pauses."""

    async def fault(sent: Sent, request: web.Request) -> web.StreamResponse | None:
        first = request.http_range.start or 0
        if not sent.path.endswith(".safetensors"):
            return None
        response = web.StreamResponse(status=206 if first else 200)
        if first:
            span = f"bytes {first}-{len(sent.body) - 1}/{len(sent.body)}"
            response.headers["Content-Range"] = span
        await response.prepare(request)
        for start in range(first, len(sent.body), chunk):
            await response.write(sent.body[start : start + chunk])
            await asyncio.sleep(pause_s)
        return response

    return fault


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
def test_a_download_that_was_ended_goes_on(
    hub: FakeHub, cache: Path, number: signal.Signals, code: int
) -> None:
    hub.add("Org/Model", plain_files())
    hub.faults.append(slowly(1 << 16, 0.05))
    command = [sys.executable, "-m", "serve", "pull", "Org/Model"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=dict(os.environ))
    blobs = cache / "models--Org--Model" / "blobs"
    digest = hub.repos["Org/Model"].files["model.safetensors"].digest
    part = blobs / f"{digest}.incomplete"
    end_s = time.monotonic() + 30
    while not part.exists() or part.stat().st_size < 1 << 19:
        assert time.monotonic() < end_s and process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert process.returncode == code and b"Traceback" not in err
    kept = part.stat().st_size
    assert 1 << 19 <= kept < len(WEIGHTS) and WEIGHTS.startswith(part.read_bytes())
    assert not list(cache.glob("models--*/snapshots"))
    hub.faults.clear()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched()[-1].range == f"bytes={kept}-"
    assert "of it are here already" in done.stderr


@pytest.mark.process
def test_a_server_starts_by_name(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", llama_files())
    with serve_run("Org/Model") as (process, url):
        end_s = time.monotonic() + 60
        while True:
            assert process.poll() is None and time.monotonic() < end_s
            try:
                with urllib.request.urlopen(f"{url}/v1/models") as answer:
                    (model,) = json.load(answer)["data"]
                break
            except OSError:
                time.sleep(0.1)
        body = json.dumps({"model": "Org/Model", "prompt": "a", "max_tokens": 1, "stream": True})
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", body.encode(), headers)
        with urllib.request.urlopen(request) as answer:
            assert answer.readline().startswith(b"data: {")
    assert model["id"] == "Org/Model"
    assert len(hub.fetched(".safetensors")) == 1


@pytest.mark.process
def test_two_processes_fetch_a_file_once(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", plain_files())
    hub.faults.append(slowly(1 << 18, 0.2))
    command = [sys.executable, "-m", "serve", "pull", "Org/Model"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outs = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0] and len(outs) == 1
    assert (Path(outs.pop().strip()) / "model.safetensors").read_bytes() == WEIGHTS
    assert len(hub.fetched()) == 1
