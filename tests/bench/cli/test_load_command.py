"""How long a search of `serve bench` offers each rate, and its files when a run fails."""

from __future__ import annotations

import contextlib
import json
import math

import pytest

from bench.cli import load as command
from bench.cli.load import run
from bench.load.proof.fake_script import Profile
from bench.load.proof.truth import scripted_server
from bench.load.workload.online_options import OnlineOptions
from serve.errors import ConfigError, MergestepError
from tests.support.engine.load_runs import queue_run


@pytest.fixture
def offered(monkeypatch):
    """Returns the (rate, seed, requests) of each run of a queue that serves 10/s, and the rates
    that raise."""
    asked, failing = [], {}

    def once(rate, seed, requests):
        asked.append((rate, seed, requests))
        if rate in failing:
            raise failing[rate]
        return queue_run(rate, seed, count=requests or 200)

    @contextlib.contextmanager
    def offering(options):
        yield once

    monkeypatch.setattr(command, "_offering", offering)
    monkeypatch.setattr("sys.argv", ["serve", "bench"])
    return asked, failing


def searched(**others):
    given = {"slo": "e2e=2000", "find_max_qps": True, "attainment": 0.9, "qps": "1"}
    return OnlineOptions("default", **(given | others))


@pytest.mark.parametrize("seed", [0, 10, 20])
def test_a_search_offers_each_rate_for_long_enough(offered, tmp_path, seed):
    path = tmp_path / "a.json"
    assert run(searched(seed=seed, json_file=path))
    asked, _ = offered
    assert asked[0] == (1.0, seed, 100)
    assert asked[3][2] == 240 and asked[4][2] == 480, "30 s of 8/s, and of 16/s"
    assert all(requests == max(100, math.ceil(30 * rate)) for rate, _, requests in asked)
    document = json.loads(path.read_text())
    assert 8 < document["search"]["max_qps"] < 10.5
    assert not any("a search needs" in note for run in document["runs"] for note in run["notes"])


def test_ten_times_the_longest_limit(offered):
    run(searched(slo="ttft=200,e2e=5000"))
    assert offered[0][1] == (2.0, 0, 100) and offered[0][2] == (4.0, 0, 200)


def test_rates_that_are_too_short_as_the_user_wants_them_are_noted(offered, tmp_path):
    path = tmp_path / "a.json"
    run(searched(requests=200, json_file=path))
    assert {requests for _, _, requests in offered[0]} == {None}
    for found in json.loads(path.read_text())["runs"]:
        said = [note for note in found["notes"] if "a search needs 30 s" in note]
        assert len(said) == (200 / found["qps"] < 30)


ERRORS = [MergestepError("no server"), OSError("gone"), KeyboardInterrupt(), ConfigError("no")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_was_measured_before_an_error_is_reported(offered, tmp_path, error):
    path = tmp_path / "a.json"
    options = OnlineOptions("default", qps="1,2,3", json_file=path)
    offered[1][3.0] = error
    with pytest.raises(type(error)):
        run(options)
    document = json.loads(path.read_text())
    assert [rate["qps"] for rate in document["rates"]] == [1, 2]
    assert document["runs"][1]["notes"][-1].startswith("ended early: ")
    assert document["runs"][0]["notes"] == []


def test_without_any_result_there_is_no_report(offered, tmp_path):
    path = tmp_path / "a.json"
    offered[1][1.0] = MergestepError("no server")
    for options in (OnlineOptions("default", qps="1,2", json_file=path), searched(json_file=path)):
        with pytest.raises(MergestepError, match="no server"):
            run(options)
    assert not path.exists() and [rate for rate, *_ in offered[0]] == [1, 1]


def test_a_search_that_ends_early_is_reported(offered, tmp_path, capsys):
    path = tmp_path / "a.json"
    offered[1][4.0] = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        run(searched(json_file=path))
    found = json.loads(path.read_text())["search"]
    assert found["max_qps"] == 2 and found["stopped"] == "at 4 requests/s: gone"
    assert "search stopped: at 4 requests/s: gone" in capsys.readouterr().out
    offered[1].clear()
    offered[1][1.0] = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        run(searched(json_file=path))


@pytest.mark.process
def test_a_server_that_dies_after_the_first_rate(tmp_path, monkeypatch):
    server = contextlib.ExitStack()
    url = server.enter_context(scripted_server(Profile()))
    offer, path = command.offer, tmp_path / "a.json"

    async def offer_then_die(*given):
        result = await offer(*given)
        server.close()
        return result

    options = OnlineOptions("default", url=url, qps="100,200", requests=10, json_file=path)
    with command._offering(options) as once:
        assert [len(once(100.0, 0, count).records) for count in (None, 7)] == [10, 7]
    monkeypatch.setattr(command, "offer", offer_then_die)
    monkeypatch.setattr("sys.argv", ["serve", "bench"])
    with server, pytest.raises(MergestepError, match="cannot reach"):
        run(options)
    (found,) = json.loads(path.read_text())["runs"]
    assert found["qps"] == 100 and len(found["requests"]["index"]) == 10
    assert "ended early: cannot reach" in found["notes"][-1]
