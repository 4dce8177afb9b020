"""The load report's figures: metrics, SLO, validity."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from bench.load.client.record import Outcome, ProcessHealth, Record, RunResult
from bench.load.results.columns import Columns
from bench.load.results.metrics import (
    concurrency,
    count_notes,
    level_at,
    peak_concurrency,
    percentile,
)
from bench.load.results.slo import PRESETS, Slo, judge, parse_slo
from bench.load.results.summary import RunSummary, summarize, summarize_rates
from serve.errors import ConfigError
from tests.support.engine.load_runs import engine_run, queue_run


def record(index: int = 0, **change: Any) -> Record:
    values: dict[str, Any] = {
        "scheduled_s": 1.0,
        "sent_s": 1.001,
        "finished_s": 1.6,
        "chunks_s": [1.101, 1.301, 1.501],
        "prompt_tokens": 4,
        "output_tokens": 5,
        "outcome": Outcome.OK,
    }
    return Record(index, **{**values, **change})


def run(*records: Record, **change: Any) -> RunResult:
    values: dict[str, Any] = {"qps": math.inf, "seed": 0, "target": "t", "window": (0.0, 10.0)}
    return RunResult(records=list(records), **{**values, **change})


def medians(summary: RunSummary) -> dict[str, float]:
    return {name: values["p50"] for name, values in summary.latencies_ms.items()}


def test_metrics_of_one_request():
    """TPOT divides by tokens, ICL counts chunks, and both starts have latencies of their own."""
    assert medians(summarize(run(record(queue_s=0.02)))) == pytest.approx(
        {
            "ttft_schedule": 101,
            "ttft_send": 100,
            "tpot": 100,
            "icl": 200,
            "e2e_schedule": 501,
            "e2e_send": 500,
            "client_queue": 1,
            "server_queue": 20,
        }
    )


def test_itl_is_per_token_where_chunks_tell_their_tokens():
    """Each token of a chunk of four tokens after 200 ms has waited for 50 ms."""
    found = summarize(run(record(chunk_tokens=[1, 4, 1], output_tokens=6))).latencies_ms
    assert found["itl"]["count"] == 5
    assert found["itl"]["mean"] == pytest.approx((4 * 50 + 200) / 5)
    assert found["icl"]["count"] == 2 and found["icl"]["mean"] == pytest.approx(200)


def test_as_many_chunks_as_tokens_are_one_token_each():
    """A server over HTTP reports one token a chunk; otherwise the chunks' tokens are unknown."""
    single = record(output_tokens=3, chunks_s=[1.1, 1.2, 1.5])
    found = summarize(run(single)).latencies_ms
    assert found["itl"] == found["icl"] and found["itl"]["max"] == pytest.approx(300)
    assert "itl" not in summarize(run(record(output_tokens=4))).latencies_ms
    both = summarize(run(single, record(1, output_tokens=None))).latencies_ms
    assert (both["itl"]["count"], both["icl"]["count"]) == (2, 4)


def test_without_usage_chunks_are_counted_and_it_is_said():
    summary = summarize(run(record(output_tokens=None)))
    assert summary.latencies_ms["tpot"]["p50"] == pytest.approx(200)
    assert "1 of 1 answer came without a token count" in count_notes(summary.counts)[0]
    assert count_notes(summarize(run(record())).counts) == []


def test_one_token_or_one_piece_has_no_tpot():
    one = summarize(run(record(chunks_s=[1.1], output_tokens=1)))
    piece = summarize(run(record(chunks_s=[1.1], output_tokens=9)))
    assert "tpot" not in one.latencies_ms and "tpot" not in piece.latencies_ms
    assert count_notes(one.counts) == []
    assert "1 answer of several tokens came in one piece" in count_notes(piece.counts)[0]


def test_only_requests_due_in_the_window_count():
    """Requests count by due time, so one that is due before the window does not count."""
    early = record(scheduled_s=0.4, sent_s=1.2, chunks_s=[1.3], finished_s=1.3)
    summary = summarize(run(early, record(1), record(2, scheduled_s=2.1), window=(0.5, 2.0)))
    assert summary.latencies_ms["ttft_send"]["count"] == 1
    assert summary.counts["scheduled"] == 3 and summary.counts["counted"] == 1


def test_outcomes_are_counted_by_kind_and_not_timed():
    summary = summarize(
        run(
            record(0),
            record(1, outcome=Outcome.FAILED, error="503: full"),
            record(2, outcome=Outcome.FAILED, error="503: full"),
            record(3, outcome=Outcome.CANCELLED),
            record(4, outcome=Outcome.INCOMPLETE, finished_s=math.nan),
            record(5, chunks_s=[]),
        ),
        Slo(ttft_s=0.2),
    )
    names = ("answered", "failed", "cancelled", "incomplete", "empty")
    assert [summary.counts[name] for name in names] == [1, 2, 1, 1, 1]
    assert summary.latencies_ms["e2e_send"]["count"] == 1
    assert summary.errors == {"503: full": 2, "succeeded, but without text": 1}
    assert (summary.good, summary.judged) == (1, 5), "a cancelled request is not judged"


def thin(**change: Any) -> Record:
    """Only the first and the last of 41 chunks are kept."""
    return record(chunks_s=[1.1, 5.1], finished_s=5.1, num_chunks=41, output_tokens=41, **change)


def test_records_that_keep_two_times_of_many():
    """They have no gaps; their tokens are spread over the whole answer."""
    kept = record(chunks_s=[1.1, 1.3], output_tokens=2, finished_s=1.3)
    summary = summarize(run(thin(), kept, window=(0.0, 6.0)))
    found = summary.latencies_ms
    assert found["tpot"]["max"] == pytest.approx(200) and found["tpot"]["p50"] == pytest.approx(150)
    assert found["icl"]["count"] == 1 and found["icl"]["max"] == pytest.approx(200)
    assert summary.rates["output_tokens_per_s"] == pytest.approx(43 / 5.1)
    first, second = (summarize(run(thin(), window=w)).rates for w in ((0.0, 3.0), (3.0, 6.0)))
    assert first["output_tokens_per_s"] * 3 == pytest.approx(41 / 2)
    assert second["output_tokens_per_s"] * 2.1 == pytest.approx(41 / 2)


def test_gaps_that_were_only_counted():
    """Nine of ten gaps are 50 ms long, and one is 400 ms long."""
    summary = summarize(run(thin(), gaps=[(0.05, 900_000), (0.4, 100_000)]))
    icl = summary.latencies_ms["icl"]
    assert icl["count"] == 1_000_000
    assert (icl["p50"], icl["p95"], icl["max"]) == pytest.approx((50, 400, 400))
    assert icl["mean"] == pytest.approx(85, rel=0.001)
    assert "ICL covers the whole run" in summary.notes[0]


def test_slo_of_gaps_where_only_their_mean_is_known():
    assert good(Slo(itl_s=0.09), thin()) == [False]
    assert good(Slo(itl_s=0.11), thin()) == [True]


def test_lag_ends_when_the_generator_began():
    """A slow connection is time of the server, and counts from the schedule."""
    result = spread(400)
    for late in result.records[200:]:
        late.dispatched_s, late.sent_s = late.sent_s, late.sent_s + 0.02
    summary = summarize(result)
    assert summary.verdict.is_valid
    assert summary.latencies_ms["client_queue"]["p99"] == pytest.approx(20)


def test_probes_are_metrics_of_their_own():
    probe = record(sent_s=3.0, scheduled_s=3.0, chunks_s=[3.05])
    found = medians(summarize(run(record(), probes=[probe])))
    assert found["probe_ttft"] == pytest.approx(50)
    assert found["ttft_send"] == pytest.approx(100)


def test_rates_count_what_happened_in_the_window():
    """Tokens of a request due before the window, that came within it, are part of the load; what
    came after the last arrival is no steady state."""
    first = record(0, scheduled_s=0.5, sent_s=0.5, chunks_s=[0.9, 1.5, 2.5], finished_s=3.0)
    first.chunk_tokens, first.output_tokens = [1, 2, 3], 6
    second = record(1, scheduled_s=1.0, sent_s=1.0, chunks_s=[1.6, 1.8], finished_s=2.0)
    second.chunk_tokens, second.output_tokens = [5, 1], 6
    last = record(2, scheduled_s=3.0, sent_s=3.0, chunks_s=[3.05], finished_s=3.05)
    rates = summarize(run(first, second, last, window=(1.0, 9.0), qps=1.0)).rates
    assert rates["output_tokens_per_s"] == pytest.approx((2 + 3 + 5 + 1) / 2)
    assert rates["peak_output_tokens_per_s"] == 9, "from 1.6 to 2.5"
    assert rates["requests_per_s"] == pytest.approx(2 / 2)
    assert rates["input_tokens_per_s"] == pytest.approx(4 / 2), "the second's prefill alone"
    assert rates["mean_concurrency"] == pytest.approx((2 + 1) / 2)
    assert rates["peak_concurrency"] == 2


def test_rates_are_of_the_time_in_which_the_load_was_offered():
    """A queue of 10/s gets twice its load and answers 10/s until the end."""
    result = queue_run(20.0, 0, count=2000)
    result.window = (0.0, result.records[-1].finished_s)
    summary = summarize(result, Slo(e2e_s=20.0))
    assert summary.rates["requests_per_s"] == pytest.approx(10, rel=0.01)
    assert summary.window[1] == pytest.approx(100, rel=0.01) and summary.offered_s == 100
    assert summary.goodput == pytest.approx(summary.good / 100)
    assert not [note for note in summary.notes if "short" in note]


def test_a_run_that_is_short_against_its_answers_says_so():
    result = queue_run(20.0, 0, count=2000, service_s=1.0)
    result.window = (0.0, result.records[-1].finished_s)
    summary = summarize(result)
    assert summary.rates["requests_per_s"] == pytest.approx(1, rel=0.01)
    assert summary.window[1] == result.window[1]
    assert "the run is short compared with its answers" in summary.notes[0]
    assert "not a steady state" in summary.verdict.warnings[0]


def test_concurrency_of_requests_without_an_end_or_a_beginning():
    nan = math.nan
    columns = Columns.of(
        run(
            record(sent_s=1.0, finished_s=2.0),
            record(sent_s=2.0, finished_s=nan),
            record(sent_s=nan, finished_s=nan),
        )
    )
    at_s, levels = concurrency(columns.sent, columns.finished, 5.0)
    assert list(level_at(Columns.of(run()).due, at_s, levels)) == []
    times = columns.due * 0 + [0.5, 1.5, 2.0]
    assert list(level_at(times, at_s, levels)) == [0, 1, 1]
    assert levels.max() == 1 and levels[-1] == 0
    assert (
        peak_concurrency([record(), record(), record(scheduled_s=3, sent_s=3, finished_s=4)]) == 2
    )


def test_percentiles():
    values = [float(value) for value in range(101)]
    assert [percentile(values, p) for p in (0, 50, 90, 99, 100)] == [0, 50, 90, 99, 100]
    assert percentile([1.0, 2.0], 50) == 1.5
    assert math.isnan(percentile([], 50))


def test_slo_text():
    slo = parse_slo("ttft=200, tpot=50,e2e=2000")
    assert slo == Slo(ttft_s=0.2, tpot_s=0.05, e2e_s=2.0)
    assert str(slo) == "TTFT 200 ms, TPOT 50 ms, E2E 2000 ms, from schedule"
    assert parse_slo("rag") == Slo(ttft_s=0.3, itl_s=0.1, e2e_s=3.0)
    assert all(parse_slo(name).limits_ms for name in PRESETS)


@pytest.mark.parametrize("text", ["", "fast", "ttft", "ttft=x", "ttft=0", "ttft=1,ttft=2", "a=1"])
def test_bad_slo_text(text):
    with pytest.raises(ConfigError, match="slo"):
        parse_slo(text)


def good(slo: Slo, *records: Record) -> list[bool]:
    return list(judge(Columns.of(run(*records)), slo)[1])


def test_slo_from_schedule_sees_what_from_send_does_not():
    late = record(sent_s=2.0, chunks_s=[2.1, 2.2, 2.3])
    assert good(Slo(ttft_s=0.2), record(), late) == [True, False]
    assert good(Slo(ttft_s=0.2, from_schedule=False), record(), late) == [True, True]


def test_each_limit_of_an_slo():
    one = record(chunks_s=[1.1], output_tokens=1)
    assert good(Slo(tpot_s=0.09), record(), one) == [False, True]
    assert good(Slo(tpot_s=0.11), record(), one) == [True, True]
    assert good(Slo(e2e_s=0.49), record(), one) == [False, True]
    # 2 gaps of 200 ms; a long answer may have one gap in a hundred over the limit
    assert good(Slo(itl_s=0.19), record(), one) == [False, True]
    for slow, expected in ((1, True), (2, False)):
        gaps = [0.1] * (101 - slow) + [0.5] * slow
        chunks = [1.0 + sum(gaps[:i]) for i in range(102)]
        assert good(Slo(itl_s=0.19), record(chunks_s=chunks)) == [expected]


def spread(count: int, lag_s: float = 0.0, **change: Any) -> RunResult:
    """Returns `count` requests, 10 a second, of which the second half is lag_s late."""
    records = [
        record(
            i,
            scheduled_s=i / 10,
            sent_s=i / 10 + lag_s * (i >= count // 2),
            chunks_s=[i / 10 + 0.1 + lag_s],
            finished_s=i / 10 + 0.2 + lag_s,
        )
        for i in range(1, count + 1)
    ]
    return run(*records, **{"qps": 10.0, "window": (0.0, count / 10), **change})


def test_a_late_generator_makes_the_run_invalid():
    verdict = summarize(spread(400, 0.006)).verdict
    assert not verdict.is_valid and "dispatch lag p99 6.0 ms, over 5 ms" in verdict.reasons[0]
    assert summarize(spread(400, 0.004)).verdict.is_valid
    assert summarize(spread(400, 0.006), Slo(ttft_s=1.0)).verdict.is_valid, "1 % of the limit"
    assert summarize(spread(400, 0.006, qps=math.inf)).verdict.is_valid
    closed = summarize(spread(400, 0.006, is_closed_loop=True)).verdict
    assert closed.is_valid and "CLOSED LOOP" in closed.warnings[0]


def test_a_rate_that_was_not_kept_makes_the_run_invalid():
    """One late request in a thousand is no lag at p99, but a late end of the schedule is."""
    result = spread(1000)
    assert summarize(result).achieved_qps == pytest.approx(10)
    result.records[-1].sent_s = 101.0
    summary = summarize(result)
    assert summary.achieved_qps == pytest.approx(10 / 1.01)
    assert [reason.partition(" of")[0] for reason in summary.verdict.reasons] == [
        "sent 9.901 requests/s"
    ]
    result = spread(100)
    for unsent in result.records[:2]:
        unsent.sent_s, unsent.chunks_s, unsent.outcome = math.nan, [], Outcome.INCOMPLETE
    assert "2 requests never sent" in summarize(result).verdict.reasons[0]


def test_no_request_in_the_window_is_no_valid_run():
    assert not summarize(run(record(), window=(5.0, 6.0))).verdict.is_valid


def test_an_interrupted_run_is_marked():
    warnings = summarize(spread(100, was_interrupted=True)).verdict.warnings
    assert "interrupted" in warnings[0]


def test_a_busy_client_is_advised():
    health = ProcessHealth(0, 400, 0.97, 0.001, 0.02, 0.1, 0, 50)
    warnings = summarize(spread(400, health=[health])).verdict.warnings
    assert "97 % of a core" in warnings[0] and "another machine" in warnings[0]
    assert "20.0 ms late" in warnings[1]
    calm = dataclasses.replace(health, cpu=0.1, loop_lag_p99_s=0.001)
    assert summarize(spread(400, health=[calm])).verdict.warnings == []
    late = summarize(spread(400, 0.006, health=[calm])).verdict
    assert "something else delayed them" in late.warnings[0]
    waiting = dataclasses.replace(calm, core_wait=0.5)
    assert summarize(spread(400, 0.006, health=[waiting])).verdict.warnings == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("load", "is_steady"), [(0.5, True), (0.8, True), (1.2, False)])
def test_over_saturation_is_seen(load, is_steady, seed):
    """A queue takes 100 ms a request."""
    result = queue_run(10 * load, seed, count=2000)
    result.window = (0.0, result.records[-1].finished_s)  # as it is when all are waited for
    warnings = summarize(result).verdict.warnings
    assert [w.partition(":")[0] for w in warnings] == ([] if is_steady else ["not a steady state"])


def test_rates_of_several_runs():
    results = [engine_run(qps, count=60, seed=seed) for qps in (8.0, 4.0) for seed in (1, 2, 3)]
    rates = summarize_rates(results, Slo(ttft_s=0.1))
    assert [rate.qps for rate in rates] == [4.0, 8.0]
    of_runs = [run.latencies_ms["ttft_send"]["p50"] for run in rates[0].runs]
    value = rates[0].latencies_ms["ttft_send"]["p50"]
    assert value.value == pytest.approx(sum(of_runs) / 3)
    assert value.low < value.value < value.high
    attainment = rates[1].attainment
    assert attainment is not None
    assert attainment.value == sum(run.good for run in rates[1].runs) / sum(
        run.judged for run in rates[1].runs
    )


def test_an_empty_run_has_no_figures():
    summary = summarize(run(record(outcome=Outcome.FAILED, chunks_s=[], error="gone")))
    assert list(summary.latencies_ms) == ["client_queue"]
    assert summary.rates["output_tokens_per_s"] == 0 and summary.errors == {"gone": 1}
