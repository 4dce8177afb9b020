"""The storms of large answers: their verdict on made-up figures, answers that are cut off, a server
that ends, and small storms on a server."""

from __future__ import annotations

import socket
import statistics
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from bench.engine import memory_storm as module
from bench.engine.memory_storm import MAX_HEALTH_S, Storm, memory_storm, run_storms
from bench.engine.storm_calls import KINDS, Server
from serve.errors import ConfigError, MergestepError

MB = 1_000_000


def storm(**changes: object) -> Storm:
    made = {"began": 600 * MB, "before": 600 * MB, "peak": 900 * MB, "after": 650 * MB}
    made["health_s"] = 0.01
    return Storm("tokenize", **{**made, "statuses": Counter({200: 2, 429: 30}), **changes})


def test_faults() -> None:
    assert storm().faults() == []
    assert storm(after=701 * MB).faults() == ["memory is 101 MB above where it began"]
    assert storm(before=650 * MB, after=701 * MB).faults(), "many small steps"
    assert storm(health_s=0.06).faults() == ["/health took 60 ms"]
    assert storm(charged=5.0).faults() == ["5 bytes are still charged"]
    grown = storm(child_before=20 * MB, child_after=120 * MB)
    assert grown.faults() == ["child processes are 100 MB above where they began"]
    assert storm(child_peak=450 * MB, child_before=70 * MB, child_after=115 * MB).faults() == []
    odd = storm(statuses=Counter({500: 1, 0: 1}))
    assert odd.faults() == ["answers have the status 0, 500", "no answer has the status 200"]


def test_a_line_has_the_peak_of_the_child_processes() -> None:
    line = storm(child_peak=450 * MB).text()
    assert line.startswith(
        "tokenize: 600 -> 900 -> 650 MB, child processes at most 450 MB, /health"
    )


def test_figures_have_the_statuses_by_number() -> None:
    """They had the pairs of a status and its count as keys."""
    assert storm().figures()["statuses"] == {200: 2, 429: 30}


def test_an_idle_child_process_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([450 * MB, 300 * MB, 80 * MB, 20 * MB])
    monkeypatch.setattr(module, "children_bytes", lambda pid: next(sizes))
    monkeypatch.setattr(module, "process_bytes", lambda pid: 600 * MB)
    monkeypatch.setattr(module, "_TRIM_S", 0.0)
    monkeypatch.setattr(module, "_SETTLE_S", 0.0)
    server = Server(0, "", 0, "", 0)
    assert module._settled(server, 700 * MB, 84 * MB) == (600 * MB, 80 * MB)
    monkeypatch.setattr(module, "_CHILD_SETTLE_S", 0.0)
    monkeypatch.setattr(module, "children_bytes", lambda pid: 450 * MB)
    assert module._settled(server, 700 * MB, 84 * MB) == (600 * MB, 450 * MB)


HEAD = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    HEAD + b"Content-Length: 4\r\n\r\nwhat": 200,
    HEAD + b"Content-Length: 9\r\n\r\nwhat": 0,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nwhat\r\n0\r\n\r\n": 200,
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\nwhat": 0,
    b"what?\r\n\r\n": 0,
    b"": 0,
}


@pytest.fixture
def answering() -> Iterator[int]:
    """Gives the port of a server that sends ANSWERS, one for each connection."""

    def answer() -> None:
        for sent in ANSWERS:
            connection, _ = listener.accept()  # raises after a while if the test has failed
            with connection:
                connection.recv(1 << 16)
                connection.sendall(sent)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10.0)
        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_answers_that_are_cut_off_are_counted(answering: int) -> None:
    """They ended their client's thread, or counted as whole."""
    server = Server(0, "127.0.0.1", answering, "", 0)
    found = [module._post(server, "/tokenize", b"{}") for _ in ANSWERS]
    assert found == list(ANSWERS.values())


@pytest.mark.process
def test_a_server_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher ended with a traceback, and the storm with EOFError."""
    for name in ("_TRIM_S", "_SETTLE_S", "_CHILD_SETTLE_S"):
        monkeypatch.setattr(module, name, 0.0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = Server(ended.pid, "127.0.0.1", port, "model", 512)
    with pytest.raises(MergestepError, match=r"the server has ended: .*refused"):
        list(run_storms(server, ["tokenize"], clients=2, scale=0.01))


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="no such kind"):
        memory_storm(["no such kind"])


def small_storms(
    kinds: Sequence[str], scale: float, monkeypatch: pytest.MonkeyPatch
) -> list[Storm]:
    """Runs small storms with little to be charged. Memory that has grown no more than allowed is
    not waited for."""
    monkeypatch.setattr(module, "_TRIM_S", 0.0)
    return memory_storm(kinds, clients=8, scale=scale, options=("--max-work-bytes", "64MiB"))


@pytest.mark.process
@pytest.mark.parametrize(("is_long", "scale"), [(False, 0.1), (True, 0.01)])
def test_small_storms(is_long: bool, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind is answered, leaves no charge, and gives its memory back."""
    kinds = [kind for kind, of in KINDS.items() if of.is_long is is_long]
    storms = {storm.kind: storm for storm in small_storms(kinds, scale, monkeypatch)}
    assert set(storms) == set(kinds)
    for found in storms.values():
        assert [fault for fault in found.faults() if "/health" not in fault] == [], found
    assert is_long or storms["token strings"].statuses[429] > 0


@pytest.mark.timing
@pytest.mark.process
def test_health_is_answered_during_small_storms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three hold, since the clients share the machine with the server."""
    kinds = ("token strings", "detokenize", "count messages", "long prompts")
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for storm in small_storms(3 * kinds, 0.1, monkeypatch):
        found[storm.kind].append(storm.health_s)
    assert max(map(statistics.median, found.values())) <= MAX_HEALTH_S, found
