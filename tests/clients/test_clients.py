"""Client libraries against a server with default settings, as their users have them.

Each test runs one of the scripts beside this file in the environment of build/clients that has the
library; `make clients` installs them. docs/clients.md says what works.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from serve.text.chat_parser.formats import TOOL_FORMATS
from tests.support.http.dictated_engine import dictated_engine
from tests.support.http.running_server import ServerThread
from tests.support.http.serve_process import ROOT, serve_run
from tests.support.text.spoken_formats import make_model, said, spoken

pytestmark = pytest.mark.process

MODEL = "mergestep-default"
ENVIRONMENTS = ROOT / "build" / "clients"
SCRIPTS = Path(__file__).parent
TIMEOUT_S = 240.0
SUMS = ({"a": 2, "b": 3}, {"a": 1, "b": 1})
SUMMED = "5 and 2."  # as in checks.py
# Libraries by the environment that has them: some need an older openai than the others.
LIBRARIES = [
    *(("openai3", name) for name in ("openai", "anthropic", "langchain_openai")),
    *(("openai3", name) for name in ("openai_agents", "pydantic_ai")),
    *(("openai2", name) for name in ("openai", "instructor", "litellm", "llama_index", "outlines")),
    *(("load", name) for name in ("lm_eval", "guidellm", "aiperf")),
]


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, "the server does not get ready"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, str]]]:
    """For each format: a server whose model speaks it, and what a user says for two sums."""
    path = tmp_path_factory.mktemp("formats")
    with ExitStack() as stack:
        servers = {}
        for name in TOOL_FORMATS:
            engine = dictated_engine(MODEL, make_model(path / name, name))
            server = stack.enter_context(ServerThread(engine))
            texts = [spoken(name, [("add", arguments)]) for arguments in SUMS]
            answers = " ".join(f"SAY<<{text}>>" for text in (*texts, said(name, SUMMED)))
            servers[name] = server.url, f"Do it. {answers}"
        yield servers


@pytest.fixture(scope="module")
def variables(
    tmp_path_factory: pytest.TempPathFactory, formats: dict[str, tuple[str, str]]
) -> Iterator[dict[str, str]]:
    """The variables of the scripts' environment. Nothing but the servers may be asked."""
    home = tmp_path_factory.mktemp("home")
    with serve_run() as (_, url), ServerThread(dictated_engine(MODEL)) as dictated:
        wait_until_ready(url)
        yield {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "PYTHONUNBUFFERED": "1",
            "CLIENTS_ROOT": url,
            "CLIENTS_DICTATED_ROOT": dictated.url,
            "CLIENTS_FORMATS": json.dumps(formats),
            "CLIENTS_TOKENIZER": str(ROOT / "serve" / "default_model"),
            "CLIENTS_TORCH": str(Path(torch.__file__).parents[1]),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }


@pytest.mark.parametrize(("environment", "name"), LIBRARIES)
def test_a_library(environment: str, name: str, variables: dict[str, str], tmp_path: Path) -> None:
    python = ENVIRONMENTS / environment / "bin" / "python"
    if not (ENVIRONMENTS / environment / ".installed").exists():
        pytest.skip(f"{ENVIRONMENTS / environment} is not installed: make clients")
    script = SCRIPTS / f"{name}_checks.py"
    done = subprocess.run(
        [str(python), str(script)],
        cwd=tmp_path,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"\n{done.stdout[-12_000:]}"
    written = len(re.findall(r"^(?:async )?def check_", script.read_text(), re.MULTILINE))
    assert written == len(re.findall(r"^passed ", done.stdout, re.MULTILINE)) > 0


def test_every_script_is_run() -> None:
    scripts = {path.name.removesuffix("_checks.py") for path in SCRIPTS.glob("*_checks.py")}
    assert scripts == {name for _, name in LIBRARIES}
