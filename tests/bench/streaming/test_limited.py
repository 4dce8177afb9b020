"""A limit made by taking the rest of the memory, and what is measured under it."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bench.streaming import ballast, limited

SIZE = 1 << 16


class Machine:
    """A machine with so many bytes, of which others and the chunks take some."""

    def __init__(self, total: int) -> None:
        self.total, self.others = total, 0
        self.chunks: list[mmap.mmap] = []

    def available(self) -> int:
        return self.total - self.others - len(self.chunks) * SIZE

    def level(self, left: int) -> None:
        ballast.level(self.chunks, left, self.available, SIZE)


def test_level_takes_and_gives_back() -> None:
    machine = Machine(40 * SIZE)
    for others in (0, 25, 39, 40, 10):
        machine.others = others * SIZE
        machine.level(10 * SIZE)
        expected = max(0, 30 - others)
        assert len(machine.chunks) == expected, f"{others=}"
    assert all(chunk[0] == 1 and chunk[SIZE - 1] == 1 for chunk in machine.chunks), "it is touched"


@pytest.mark.parametrize(("available", "ends"), [(1 << 20, True), (1 << 30, False)])
def test_what_was_left_is_used_up(
    monkeypatch: pytest.MonkeyPatch, available: int, ends: bool
) -> None:
    looks = iter([[]] * 10 + [[0]])
    monkeypatch.setattr(ballast, "meminfo", lambda name: available)
    monkeypatch.setattr(ballast, "level", lambda *_: None)
    monkeypatch.setattr(ballast.select, "select", lambda *_: (next(looks), [], []))
    monkeypatch.setattr(ballast.os, "write", lambda fd, data: len(data))
    monkeypatch.setattr(ballast.os, "read", lambda fd, size: b"")
    if ends:
        with pytest.raises(SystemExit, match="used up"):
            ballast.hold(1 << 30)
    else:
        ballast.hold(1 << 30)


def test_bad_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ballast, "meminfo", {"SwapTotal": 1, "MemAvailable": 9}.__getitem__)
    with pytest.raises(SystemExit, match=r"--free .* swap"):
        ballast.Ballast(5)
    monkeypatch.setattr(ballast, "meminfo", {"SwapTotal": 0, "MemAvailable": 9}.__getitem__)
    with pytest.raises(SystemExit, match="--free: only 9 bytes"):
        ballast.Ballast(10)


@pytest.mark.process
def test_the_process_that_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """More is to be left than there is, so that it takes none."""
    monkeypatch.setattr(ballast, "meminfo", {"SwapTotal": 0, "MemAvailable": 1 << 60}.__getitem__)
    with ballast.Ballast(1 << 50) as held:
        pid = held._process.pid
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
        held.level()
    assert held._process.returncode == 0, "the end of its input ends it"
    with ballast.Ballast(1 << 50) as held:
        os.kill(held._process.pid, signal.SIGKILL)
        with pytest.raises(SystemExit, match="exit code -9"):
            held.level()


def test_answers_are_computed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = []

    def here(job: dict[str, Any]) -> dict[str, Any]:
        jobs.append(job)
        return {"weights": 5, "answers": {}}

    monkeypatch.setattr(limited, "here", here)
    asked = [(3, [1, 2]), (3, [1, 2]), (3, [2]), (3, [2, 4]), (5, [2])]
    for tokens, requests in asked:
        known = limited.prepare(tmp_path, {"tokens": tokens, "requests": requests})
        assert known["weights"] == 5
    assert [job["requests"] for job in jobs] == [[1, 2], [2, 4], [2]]


def test_a_failed_process_says_why() -> None:
    with pytest.raises(SystemExit, match="No module"):
        limited.child([limited.sys.executable, "bench.streaming.not_there"], {})


def found(tokens_s: float, llama_s: float, *, is_equal: bool = True) -> limited.Round:
    here = {
        "tokens_s": tokens_s,
        "is_equal": is_equal,
        "read_rate": 8e6,
        "disk_rate": 1e7,
        "hits": None,
    }
    llama = {"tokens_s": llama_s, "read": 3e6, "seconds": 3.0, "file": 25.0}
    return limited.Round(here, llama, [10**8, 2 * 10**8])


def test_a_row_has_medians() -> None:
    rounds = [found(30, 2), found(10, 4), found(20, 5)]
    cells = limited.row(8, rounds, 100)
    expected = ["8", "100-200", "yes", "20.00", "8", "10", "80%", "4.00", "1", "25%", "5.00"]
    assert cells == expected
    assert limited.row(8, [*rounds, found(1, 1, is_equal=False)], 100)[2] == "NO"


@pytest.mark.exhaustive
@pytest.mark.process
def test_from_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small model, without a limit and with figures in place of llama.cpp's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[int] = []

    def llama_cpp(args: argparse.Namespace, tokens: list[list[int]]) -> dict[str, float]:
        asked.append(len(tokens))
        return {"tokens_s": 1.0, "read": 1.0, "seconds": 1.0, "file": 1.0, "anonymous": 1.0}

    monkeypatch.setattr(limited, "llama_cpp", llama_cpp)
    file = tmp_path / "found.json"
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"1")
    command = f"limited --model small-32k --requests 3 --tokens 3 --rounds 1 --json {file}"
    command += f" --share 0.7 --llama-python python --gguf {gguf}"
    monkeypatch.setattr(limited.sys, "argv", command.split())
    limited.main()
    rounds = json.loads(file.read_text())
    (one,) = rounds["3"]
    assert asked == [3] and len(one["free"]) == 2
    assert one["here"]["is_equal"] and one["here"]["read_rate"] > 0
