"""`serve run` prints a summary of what it chose, or why it cannot start."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ops.cpu import native_library
from serve import machine
from serve.cli import start_summary
from serve.cli.main import app
from serve.engine.engine import Engine
from serve.engine.llm import LLM
from serve.engine.stats import EngineStats
from serve.errors import RequestError
from serve.http import HttpServer, HttpSettings
from serve.sampling_params import SamplingParams
from tests.support.engine.checkpoints import checkpoint, edit_json

ROOT = Path(__file__).parents[3]
KEY = "0123456789abcdef-key"


def started(http: HttpSettings, **settings: Any) -> tuple[dict[str, str], EngineStats, str]:
    """Returns the summary's lines by name, the engine's statistics and the server's URL."""

    async def live() -> tuple[dict[str, str], EngineStats, str]:
        engine = Engine(**settings)
        async with HttpServer(engine, http) as server:
            lines = start_summary.engine_lines(engine, 1.5) + start_summary.server_lines(server)
            return dict(lines), engine.stats(), server.url

    return asyncio.run(live())


def test_the_summary_of_the_embedded_model() -> None:
    lines, stats, url = started(HttpSettings(port=0))
    assert lines["model"] == "llama, 4.49 M parameters, context 1,024"
    tokens = stats.pages_total * stats.kv_page_bytes // stats.kv_bytes_per_token
    assert f": {tokens:,} tokens, " in lines["memory"]
    page_tokens = stats.kv_page_bytes // stats.kv_bytes_per_token
    users = min(256, stats.pages_total // -(-1024 // page_tokens))
    assert lines["memory"].endswith(f" {users} users with 1,024 each")
    if native_library.is_available():
        assert native_library.instruction_set() in lines["computes"]
        assert re.fullmatch(r"int8 \(bfloat16 checkpoint, \w+ kernels\)", lines["weights"])
    assert lines["prefixes"] == "shared"
    assert lines["API"] == f"{url}/v1"
    assert lines["metrics"] == f"{url}/metrics"
    assert lines["keys"].startswith("none")
    assert lines["started in"].startswith("1.50 s; the process has ")


def test_the_summary_follows_the_settings(tmp_path: Path) -> None:
    lines, stats, url = started(
        HttpSettings(port=0, api_keys=(KEY,), metrics_port=0),
        model=str(checkpoint("llama")),
        dtype="float32",
        max_model_len=50,
        max_num_seqs=2,
        kv_cache_bytes=4 << 20,
        prefix_cache=False,
        order="fair",
        inter_token_slo_ms=50,
        ttft_slo=2,
    )
    assert lines["weights"] == "float32 (as asked for)"
    assert lines["K/V"] == "float32 (as the products)"
    assert re.search(r"context 50 of \d+$", lines["model"])
    assert stats.pages_total * stats.kv_page_bytes <= 4 << 20
    assert lines["memory"].endswith(" 2 users with 50 each"), "no more are served at once"
    assert lines["prefixes"] == "not shared"
    assert "order fair, a token every 50 ms, the first within 2 s" in lines["scheduling"]
    assert lines["keys"] == "1, from the environment"
    assert KEY not in str(lines)
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d+/metrics", lines["metrics"])
    assert lines["metrics"] != f"{url}/metrics"


def test_the_summary_says_how_rows_travel_to_memory_nodes() -> None:
    reason = "endpoint: the node knows no lanes"
    ways = {"rdma://a:1": "lane", "rdma://b:1": reason, "rdma://c:1": "lane"}
    assert start_summary._rows({}, "cuda") == start_summary._rows({}, "cpu") == []
    [(name, text)] = start_summary._rows(ways, "cpu")
    assert (name, text) == ("rows", "of each step go to 3 memory nodes, which attend to them")
    assert start_summary._rows(ways, "cuda") == [
        ("rows", "to 2 memory nodes by the GPU's stream in decode steps (lane)"),
        ("", "to a memory node by the host, as the node knows no lanes (endpoint)"),
    ]


@pytest.mark.parametrize("is_quiet", [False, True])
def test_the_printed_summary(is_quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    async def live() -> str:
        engine = Engine(str(checkpoint("llama")))
        async with HttpServer(engine, HttpSettings(port=0, api_keys=(KEY,))) as server:
            start_summary.print_ready(server, engine, 1.0, is_quiet=is_quiet)
            return f"{engine.model_name} is ready at {server.url}/v1\n"

    ready = asyncio.run(live())
    output = capsys.readouterr().out
    assert output.startswith(ready)
    assert (output == ready) == is_quiet
    assert ('-H "Authorization: Bearer $KEY"' in output) != is_quiet
    assert "\x1b" not in output and KEY not in output


def test_a_chat_template_that_cannot_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The start tells it, with file and error, and goes on for completions."""
    path = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    edit_json(path / "tokenizer_config.json", lambda values: values.pop("chat_template"))
    lines, _, _ = started(HttpSettings(port=0), model=str(path))
    assert lines["chat"] == "not served: the model has no chat template"
    assert "chats cannot be served" not in caplog.text
    (path / "chat_template.jinja").write_text("{% for message in messages %}")
    lines, _, _ = started(HttpSettings(port=0), model=str(path))
    problem = f"{path / 'chat_template.jinja'}: the chat template does not compile: "
    assert lines["chat"].startswith(f"not served: {problem}")
    assert f"chats cannot be served, but completions can: {problem}" in caplog.text
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    with LLM(str(path)) as llm:
        assert llm.generate("the quick brown fox", params)[0].outputs[0].text
        with pytest.raises(RequestError, match="does not compile"):
            llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("dtype", "free", "expected"),
    [
        ("float32", 10 << 20, "memory are free; dtype int8 ("),
        ("int8", 6 << 20, "6 MiB of memory are free; dtype int4"),
        ("auto", 1 << 20, "1 MiB of memory are free; a smaller model is needed"),
    ],
)
def test_weights_that_do_not_fit(
    dtype: str, free: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.loading.footprint.available_memory", lambda: free)
    packed = ["--packed-cache", "off"]  # without a file nothing can be streamed from it
    result = CliRunner().invoke(app, ["run", "--dtype", dtype, "--port", "0", *packed])
    assert result.exit_code == 2
    assert "the weights take" in result.stderr and expected in result.stderr


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "max", "memory.current": "5"}, None),
        ({"memory.max": "1000", "memory.current": "400"}, 600),
        (
            {
                "memory.max": "1000",
                "memory.current": "900",
                "memory.stat": "anon 1\ninactive_file 300\n",
            },
            400,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "900",
                "memory/memory.stat": "inactive_file 5\ntotal_inactive_file 50\n",
            },
            150,
        ),
    ],
)
def test_memory_of_a_container(
    files: dict[str, str], free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache counts as available, since it is reclaimable."""
    meminfo = "MemAvailable: 7 kB\n"
    texts = {f"/sys/fs/cgroup/{name}": text for name, text in files.items()}
    texts["/proc/meminfo"] = meminfo
    monkeypatch.setattr(machine, "_read", lambda path: texts.get(path, ""))
    assert machine.available_memory() == (7 * 1024 if free is None else free)


@pytest.mark.timing
def test_help_imports_no_large_library() -> None:
    """This keeps `serve --help` and `serve run --print-config` fast."""
    script = (
        "import sys, serve.cli.main\n"
        "from typer.testing import CliRunner\n"
        "for words in (['--help'], ['run', '--help'], ['run', '--print-config']):\n"
        "    assert CliRunner().invoke(serve.cli.main.app, words).exit_code == 0\n"
        "heavy = {'torch', 'aiohttp', 'numpy', 'matplotlib', 'transformers', 'uvloop'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    started_s = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
    assert time.perf_counter() - started_s < 10  # about 1 s on an idle machine


@pytest.mark.parametrize(
    "command", ["run", "cluster", "node", "chat", "bench", "plan", "models", "eval"]
)
def test_every_help_has_examples_and_exit_codes(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"serve {command}" in result.output.partition("Examples")[2]
    assert "Exit code" in result.output


def test_the_version_and_a_misspelt_command() -> None:
    version = CliRunner().invoke(app, ["--version"])
    assert version.exit_code == 0
    assert version.output == CliRunner().invoke(app, ["version"]).output
    misspelt = CliRunner().invoke(app, ["rnu"])
    assert misspelt.exit_code == 2
    assert "Did you mean 'run'?" in misspelt.output


def test_the_shell_completes_values() -> None:
    words = {"COMP_WORDS": "serve run --dtype i", "COMP_CWORD": "3"}
    result = CliRunner().invoke(
        app, prog_name="serve", env={"_SERVE_COMPLETE": "complete_bash", **words}
    )
    assert result.stdout.split() == ["int8", "int4", "int4-searched"]


def test_more_kv_memory_than_is_free_gives_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("serve.loading.kv_sizing.available_memory", lambda: 1 << 20)
    started(HttpSettings(port=0), model=str(checkpoint("llama")), kv_cache_bytes=3 << 20)
    assert "kv_cache_bytes: 3 MiB asked for, but only 1 MiB are free now" in caplog.text


def test_kv_memory_that_the_settings_never_use_is_not_granted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    settings = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_bytes": 9 << 40}
    lines, stats, _ = started(HttpSettings(port=0), **settings)
    granted = stats.pages_total * stats.kv_page_bytes
    assert granted < 5 << 20
    assert "kv_cache_bytes: 9 TiB asked for, of which " in caplog.text
    assert "no more is granted" in caplog.text
    assert "(of 9 TiB asked for; the settings never use more)" in lines["memory"]
