"""A server from the wheel that `make wheel` builds, on a machine without a compiler."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import build_wheel
from tests.support.source_tree import ROOT

TOOLS = ("scikit_build_core", "nanobind", "auditwheel")
needs_tools = pytest.mark.skipif(
    not all(importlib.util.find_spec(tool) for tool in TOOLS),
    reason=f"`make wheel` installs {', '.join(TOOLS)}",
)


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def version() -> str:
    return str(project()["project"]["version"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel as `make wheel` does. It compiles what build/ does not have yet: nothing
    after `make test`, everything (two minutes of two cores) in a tree that make has not set up."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, str(ROOT / "deploy/build_wheel.py"), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    assert str(made) in done.stdout and " bytes; " in done.stdout
    return made


@pytest.mark.process
@needs_tools
def test_the_wheel_is_for_old_systems_too(wheel: Path) -> None:
    name, tagged, python, abi, platform = wheel.stem.split("-")
    assert (name, tagged) == ("mergestep", version())
    assert platform.startswith("manylinux_2_")
    here = f"cp3{sys.version_info.minor}"
    assert (python, abi) == ((here, here) if sys.version_info < (3, 12) else ("cp312", "abi3"))


@pytest.mark.process
@needs_tools
def test_it_serves_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    python = installed(wheel, tmp_path / "environment")
    where = "import ops._native, serve; print(serve.__file__); print(ops._native.__file__)"
    env = bare_environment(python.parent, tmp_path)
    for tool in ("c++", "g++", "clang++", "cc", "gcc", "clang", "cmake", "ninja"):
        assert shutil.which(tool, path=env["PATH"]) is None
    files = subprocess.run([python, "-c", where], env=env, cwd=tmp_path, capture_output=True)
    assert files.returncode == 0, files.stderr.decode()
    assert all(line.startswith(str(tmp_path)) for line in files.stdout.decode().splitlines())
    with server(python.parent / "serve", env, tmp_path) as (process, url):
        assert next(streamed(url))["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def installed(wheel: Path, environment: Path) -> Path:
    """Makes an environment that has the wheel, and beside it only what the wheel depends on: from
    the folders of this interpreter, whose own .pth files are not read. Returns its interpreter."""
    venv.create(environment)
    python = environment / "bin" / "python"
    options = ["--no-index", "--no-deps", "--quiet", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (packages,) = environment.glob("lib/python3*/site-packages")
    others = [folder for folder in sys.path if folder.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n")
    return python


def bare_environment(scripts: Path, home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name.startswith(("LC_", "LANG"))}
    return kept | {"PATH": str(scripts), "HOME": str(home)}


@contextlib.contextmanager
def server(command: Path, env: dict[str, str], cwd: Path) -> Iterator[tuple[Any, str]]:
    """Runs `serve run` on the embedded model; yields the process and the server's address, which
    its first line ends with."""
    command_line = [command, "run", "--port", "0", "--quiet"]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command_line, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            log.seek(0)
            assert " is ready at http://" in ready, log.read().decode()
            yield process, ready.split()[-1].removesuffix("/v1")
        finally:
            process.kill()


def streamed(url: str) -> Iterator[dict[str, Any]]:
    """Yields the events of a streamed completion."""
    body = {"model": "mergestep-default", "prompt": "Once", "max_tokens": 4, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def written(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def complete_files() -> dict[str, bytes]:
    """Returns names that the wheel has to have, with as little in them as the check allows."""
    names = build_wheel.modules(project()) | set(build_wheel.ALWAYS)
    return dict.fromkeys(names, b"") | {
        "mergestep.dist-info/METADATA": f"Name: mergestep\nVersion: {version()}\n".encode(),
        "ops/_native.abi3.so": b"\0avx512\0\0avxvnni\0\0avx2\0\0portable\0",
        "transport/_windows.abi3.so": b"",
    }


def test_a_whole_wheel_has_no_faults(tmp_path: Path) -> None:
    path = written(tmp_path / "whole.whl", complete_files())
    assert build_wheel.faults(path, "x86_64") == []


def test_faults_are_named(tmp_path: Path) -> None:
    files = complete_files()
    for name in list(files):
        if name.endswith(("METADATA", "serve/config.py", "_windows.abi3.so")):
            del files[name]
    files["ops/_native.abi3.so"] = b"\0avx2\0\0portable\0"
    files |= {"tests/conftest.py": b"", "ops/csrc/isa.h": b"", "bench/gpu/report.py": b""}
    assert build_wheel.faults(written(tmp_path / "torn.whl", files), "x86_64") == [
        f"The metadata do not have version {version()}.",
        "serve/config.py is missing.",
        "bench/gpu/report.py does not belong into it.",
        "ops/csrc/isa.h does not belong into it.",
        "tests/conftest.py does not belong into it.",
        "The kernels of avx512 are missing.",
        "The kernels of avxvnni are missing.",
        "It has 0 files of the library transport/_windows, not one.",
    ]


def test_a_wheel_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "large.whl", complete_files())
    monkeypatch.setattr(build_wheel, "MAX_WHEEL_BYTES", 1000)
    (fault,) = build_wheel.faults(path, "x86_64")
    assert fault.endswith("more than 1,000.")
