"""Reports of runs with many failed or unfinished requests, and comparisons of loads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.load.client.health import stolen_notes
from bench.load.client.record import Outcome, RunResult
from bench.load.report.report import report
from bench.load.results.slo import Slo
from bench.load.results.summary import summarize, summarize_rates
from tests.bench.load.report.test_report import record, run, spread
from tests.bench.load.report.test_report_files import compared, printed
from tests.support.engine.load_runs import queue_run


def lost(count: int, of: int, **change: Any) -> RunResult:
    """The target is gone for the last requests."""
    result = spread(of, **change)
    for gone in result.records[of - count :]:
        gone.outcome, gone.chunks_s, gone.error = Outcome.FAILED, [], "refused"
    return result


def test_a_run_of_which_most_failed_is_not_valid():
    summary = summarize(lost(42, 50))
    assert summary.verdict.reasons == [
        "42 of 50 requests failed: latencies are those of the other requests"
    ]
    assert summary.verdict.is_kept, "the generator is not to blame"
    (rate,) = summarize_rates([lost(42, 50), lost(0, 50)])
    assert rate.failed_share.value == 0.42 and rate.failed_text == "42 of 100 requests failed"
    few = summarize(lost(5, 50)).verdict
    assert few.is_valid and few.warnings == ["5 of 50 requests failed"]
    assert summarize(lost(0, 50)).verdict.warnings == []


def test_what_an_interruption_cut_off_did_not_fail():
    result = spread(50, was_interrupted=True)
    for cut in result.records[20:]:
        cut.outcome, cut.finished_s = Outcome.INCOMPLETE, math.nan
    assert (summarize(result).verdict.num_lost, summarize(result).verdict.num_asked) == (0, 20)
    result.was_interrupted = False
    assert not summarize(result).verdict.is_valid


def test_the_rate_of_an_interrupted_run_is_what_was_sent():
    """62 requests are due and sent within 10 s, and 5 a second are planned."""
    records = [record(i, scheduled_s=i * 10 / 62, sent_s=i * 10 / 62) for i in range(1, 63)]
    result = run(*records, qps=5.0, was_interrupted=True)
    assert summarize(result).achieved_qps == pytest.approx(6.2)
    assert not summarize(result).verdict.reasons


def test_goodput_is_at_most_the_answers_of_the_same_time():
    """Ten requests within a second have answers of half a second, so some end after it."""
    records = [
        record(i, scheduled_s=i / 10, sent_s=i / 10, chunks_s=[i / 10 + 0.45], finished_s=9)
        for i in range(1, 11)
    ]
    result = run(*records, qps=10.0, window=(0.0, 9.0))
    summary = summarize(result, Slo(e2e_s=1.0))
    assert summary.good == 10
    assert summary.goodput == summary.rates["requests_per_s"] == 5
    assert summarize(result, Slo(e2e_s=0.1)).goodput == 0
    assert math.isnan(summarize(result).goodput)


def test_the_best_second_is_any_second():
    """The peak second may begin at any time; a window below two seconds has no peak."""
    at_s = [0.9, 0.95, 1.0, 1.05, 1.1, 3.0]
    answer = record(chunks_s=at_s, output_tokens=6, scheduled_s=0.0, sent_s=0.0, finished_s=3.0)
    name = "peak_output_tokens_per_s"
    assert summarize(run(answer)).rates[name] == 5
    assert name not in summarize(run(answer, window=(0.0, 1.5))).rates


def test_intervals_of_rates_are_not_below_zero():
    rates = summarize_rates([spread(50), spread(50, qps=10.0)], Slo(ttft_s=0.2))
    assert rates[0].rates["requests_per_s"].low > 0
    slow = lost(49, 50)
    (rate,) = summarize_rates([spread(50), slow], Slo(ttft_s=0.2))
    assert rate.goodput is not None and rate.goodput.low == rate.rates["requests_per_s"].low == 0


def test_a_few_ticks_that_the_host_kept_are_no_note():
    assert stolen_notes(0.04, 1.0) == [] and stolen_notes(0.5, 100.0) == []
    assert "host withheld 0.1 s" in stolen_notes(0.06, 1.0)[0]


def test_a_target_that_was_gone_is_loud(tmp_path):
    """Failures show in the exit code, in words, on the page, and in a comparison."""
    paths = [tmp_path / f"{name}.json" for name in ("whole", "gone")]
    result = queue_run(5.0, 0, count=50)
    written_at(paths[0], result)
    for gone in result.records[8:]:
        gone.outcome, gone.chunks_s, gone.error = Outcome.FAILED, [], "refused"
    is_valid, text = printed([result], html_file=tmp_path / "a.html")
    assert not is_valid and "INVALID: 42 of 50 requests failed" in text
    page = (tmp_path / "a.html").read_text()
    assert "must not be used; 42 of 50 requests failed</p>" in page
    assert "<b>42 of 50 requests failed</b>" in page
    written_at(paths[1], result)
    assert json.loads(paths[1].read_text())["rates"][0]["failed_share"][0] == 0.84
    good, text = compared(*paths, fail_over="10%")
    assert not good and "REGRESSION: 5/s share that failed was 0 and is 0.84" in text
    assert (
        "share that failed"
        not in compared(*reversed(paths), fail_over="10%")[1].partition("REGRESSION")[2]
    )


def written_at(path: Path, result: RunResult) -> None:
    report([result], {}, json_file=path)


def test_each_kind_of_warning_is_said_once_with_its_seeds():
    runs = [queue_run(5.0, seed, count=50) for seed in (3, 4, 5)]
    for place, result in enumerate(runs):
        result.notes = ["the same"]
        for gone in result.records[: place * 2]:
            gone.outcome, gone.chunks_s = Outcome.FAILED, []
    _, text = printed(runs)
    assert text.count("requests failed") == 1
    assert "warning: 2 of 50 requests failed (seed 4; also 5)\n" in text
    assert text.count("note: the same\n") == 1


def test_invalid_rates_are_marked_among_all_rates():
    bad = queue_run(6.0, 0, count=300)
    for late in bad.records:
        late.sent_s += 0.02
    text = printed([queue_run(5.0, 0, count=300), bad], width=80)[1]
    assert "INVALID 6" in text.partition("all rates")[2]
    assert "INVALID 5" not in text


def test_other_loads_are_said_first_and_their_throughput_is_not_compared(tmp_path):
    paths = [tmp_path / f"{name}.json" for name in ("five", "six")]
    for path, qps in zip(paths, (5.0, 6.0), strict=True):
        written_at(path, queue_run(qps, 0, count=50))
    _, text = compared(*paths)
    assert text.startswith("warning: THE LOADS DIFFER: 5 and 6 requests/s")
    assert "answers/s" not in text and "E2E schedule" in text
