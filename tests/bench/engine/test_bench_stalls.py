"""`serve bench stalls`: its figures of made-up runs, and what a failed request leaves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.common.tables import console
from bench.engine import stalls as command
from bench.load.client.record import Outcome, Record, RunResult
from bench.load.results.stalls import Stalls, stalls_of, stalls_table
from serve.errors import MergestepError


def result(count: int, **changes: Any) -> RunResult:
    """Returns a run of answers of 11 tokens, 10 ms apart, whose first token comes after i ms."""
    records = [
        Record(
            i,
            0.0,
            sent_s=0.0,
            chunks_s=[1e-3 * i + 0.01 * k for k in range(11)],
            output_tokens=11,
            outcome=Outcome.OK,
        )
        for i in range(1, count + 1)
    ]
    for name, value in changes.items():
        setattr(records[-1], name, value)
    return RunResult(1.0, 0, "made up", records, (0.0, 1.0))


def test_few_requests_have_no_p99() -> None:
    few, many = stalls_of([result(24)]), stalls_of([result(100)])
    assert few.gap_ms["p99"] == pytest.approx(10) and few.ratio == pytest.approx(1)
    assert few.as_json()["ttft_ms"] == {"p50": 12.5, "p99": None, "max": 24.0, "n": 24}
    assert many.ttft_ms["p99"] == pytest.approx(99.01)
    assert stalls_of([result(4)]).ratio is None
    text = shown({"few": few, "many": many})
    assert "max 24.0 (n 24)" in text and "99.0" in text


def shown(figures: dict[str, Stalls]) -> str:
    made = console()
    with made.capture() as capture:
        made.print(stalls_table("title", figures))
    return capture.get()


def test_a_failed_request_is_an_error_that_names_it() -> None:
    for changes, text in (
        ({"outcome": Outcome.FAILED, "error": "no memory"}, "a request failed: no memory"),
        ({"outcome": Outcome.INCOMPLETE}, "a request failed: incomplete"),
    ):
        with pytest.raises(MergestepError, match=text):
            stalls_of([result(3, **changes)])


@pytest.mark.exhaustive
def test_an_error_keeps_the_rates_before_it(tmp_path: Any, monkeypatch: Any) -> None:
    figures = [stalls_of([result(8)])]

    def second_fails(results: Any) -> Stalls:
        if not figures:
            raise MergestepError("a request failed: no memory")
        return figures.pop()

    monkeypatch.setattr(command, "CHUNKS", ())
    monkeypatch.setattr(command, "stalls_of", second_fails)
    file = tmp_path / "stalls.json"
    with pytest.raises(MergestepError, match="no memory"):
        command.stalls(
            qps="200,400", input_len=4, output_len=2, seconds=0.01, quick=True, json_file=file
        )
    assert set(json.loads(file.read_text())) == {"head", "200 requests/s"}
