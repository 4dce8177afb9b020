"""The load generator: its schedule, its arithmetic, and runs against both targets."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from bench.report import Record, peak_concurrency, percentile, print_summary, summarize
from fakes_http import FakeEngine, ServerThread
from rich.console import Console

from bench.load import (
    EngineTarget,
    LoadPlan,
    ServerTarget,
    Work,
    arrival_times,
    count_requests,
    make_work,
    parse_qps,
    run_and_report,
    run_load,
)
from serve.errors import ConfigError


@pytest.mark.parametrize(("qps", "count"), [(0.5, 10), (10, 1), (25, 1000)])
def test_the_offered_rate_is_exact(qps: float, count: int) -> None:
    times = arrival_times(qps, count, seed=3)
    assert len(times) == count
    assert times == sorted(times)
    assert times[-1] == pytest.approx(count / qps)
    assert times == arrival_times(qps, count, seed=3)
    assert count == 1 or times != arrival_times(qps, count, seed=4)


def test_arrivals_are_poisson() -> None:
    times = arrival_times(100, 20_000, seed=0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1, abs=0.05)


def test_infinite_rate() -> None:
    assert arrival_times(math.inf, 3, seed=0) == [0, 0, 0]


def test_counting() -> None:
    assert count_requests(2, None, None) == 100
    assert count_requests(2, 7, None) == 7
    assert count_requests(2.5, None, 10) == 25
    for arguments in ((2, 7, 10.0), (math.inf, None, 10.0)):
        with pytest.raises(ConfigError):
            count_requests(*arguments)


@pytest.mark.parametrize("text", ["0", "-1", "x", "nan", ""])
def test_bad_qps(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_qps(text)


def test_good_qps() -> None:
    assert parse_qps("2.5") == 2.5
    assert math.isinf(parse_qps("inf"))


def test_bad_plans() -> None:
    for change in ({"num_requests": 0}, {"input_len": 0}, {"output_len": -1}):
        with pytest.raises(ConfigError):
            LoadPlan(**{"qps": 1, "num_requests": 1, **change})


def test_random_work_has_the_length_and_tokens_asked_for() -> None:
    plan = LoadPlan(qps=1, num_requests=5, input_len=9, output_len=3)
    works = make_work(plan, 5, 0, range(40, 50))
    assert all(len(work.token_ids) == 9 and work.max_tokens == 3 for work in works)
    assert {token for work in works for token in work.token_ids} <= set(range(40, 50))
    assert works == make_work(plan, 5, 0, range(40, 50))
    assert works != make_work(plan, 5, 1, range(40, 50))


def test_natural_work_is_conversations() -> None:
    works = make_work(LoadPlan(qps=1, num_requests=5), 5, 0, range(10))
    assert all(work.messages[-1]["role"] == "user" and not work.token_ids for work in works)


def test_percentiles() -> None:
    values = [float(value) for value in range(101)]
    assert [percentile(values, p) for p in (0, 50, 90, 99, 100)] == [0, 50, 90, 99, 100]
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([7.0], 99) == 7
    assert math.isnan(percentile([], 50))


def _record(index: int = 0, **change: Any) -> Record:
    values: dict[str, Any] = {
        "scheduled_s": 10.0,
        "sent_s": 10.001,
        "finished_s": 10.6,
        "chunks_s": [10.101, 10.301, 10.501],
        "prompt_tokens": 4,
        "output_tokens": 5,
    }
    return Record(index, **{**values, **change})


def test_metrics() -> None:
    """TPOT divides by tokens, ICL counts chunks, and both starts are told apart."""
    latencies = summarize([_record()], qps=2).latencies_ms
    medians = {name: values["p50"] for name, values in latencies.items()}
    assert medians == pytest.approx(
        {
            "TTFT from send": 100,
            "TTFT from schedule": 101,
            "TPOT": 100,
            "ICL": 200,
            "E2E from send": 500,
            "E2E from schedule": 501,
        }
    )


def test_answers_of_one_token_have_no_tpot() -> None:
    record = _record(chunks_s=[10.1], output_tokens=1)
    latencies = summarize([record], qps=2).latencies_ms
    assert math.isnan(latencies["TPOT"]["p50"])
    assert math.isnan(latencies["ICL"]["p50"])


def test_failures_are_counted_and_left_out() -> None:
    records = [_record(0), _record(1, error="X: y"), _record(2, chunks_s=[])]
    summary = summarize(records, qps=2)
    assert summary.counts["answered"] == 1
    assert summary.counts["failed"] == 2
    assert summary.errors == {"X: y": 1, "no text came": 1}
    assert summary.rates["answered requests"] == pytest.approx(1 / 0.6)


@pytest.mark.parametrize(
    ("lag_s", "qps", "is_valid"), [(0.004, 5, True), (0.006, 5, False), (0.006, math.inf, True)]
)
def test_a_late_generator_makes_the_run_invalid(lag_s: float, qps: float, is_valid: bool) -> None:
    summary = summarize([_record(sent_s=10 + lag_s)], qps=qps)
    assert summary.is_valid is is_valid
    console = Console(record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_summary(console, summary, title="x")
    assert ("INVALID" in console.export_text()) is not is_valid
    console.file.close()


def test_peak_concurrency() -> None:
    records = [_record(i, sent_s=float(i), finished_s=i + 2.5) for i in range(5)]
    assert peak_concurrency(records) == 3


def test_the_loop_is_open() -> None:
    """Requests are sent on time although none has been answered."""

    class Slow:
        name = "slow"
        prompt_tokens = range(10)

        async def __aenter__(self) -> Slow:
            return self

        async def __aexit__(self, *_: object) -> None:
            return None

        async def send(self, work: Work, record: Record) -> None:
            await asyncio.sleep(0.3)
            record.chunks_s.append(record.sent_s + 0.3)

    plan = LoadPlan(qps=200, num_requests=20, input_len=1, num_warmup=0)
    records = asyncio.run(run_load(Slow(), plan))
    assert max(record.sent_s for record in records) < min(record.finished_s for record in records)
    assert summarize(records, qps=200).counts["peak concurrency"] == 20


def test_against_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = LoadPlan(qps=100, num_requests=12, num_warmup=2)
    file = tmp_path / "run.json"
    engine = FakeEngine(step_s=0.001)
    with ServerThread(engine) as server:
        run_and_report(plan, url=server.url, model="", engine=None, json_file=file)
    assert len(engine.submitted) == 14
    document = json.loads(file.read_text())
    assert document["summary"]["counts"]["answered"] == 12
    assert all(request["output_tokens"] == 11 for request in document["requests"])
    assert document["plan"]["qps"] == 100
    assert "TTFT from schedule" in capsys.readouterr().out


def test_exact_lengths_against_a_server() -> None:
    engine = FakeEngine(repeat=100)
    plan = LoadPlan(qps=math.inf, num_requests=5, input_len=7, output_len=20, num_warmup=0)

    async def run(url: str) -> list[Record]:
        async with ServerTarget(url) as target:
            return await run_load(target, plan)

    with ServerThread(engine) as server:
        records = asyncio.run(run(server.url))
    assert all((r.prompt_tokens, r.output_tokens) == (7, 20) for r in records)
    assert all(params.ignore_eos for _, params in engine.submitted)


def test_errors_of_a_server_are_records() -> None:
    plan = LoadPlan(qps=math.inf, num_requests=4, num_warmup=0)

    async def run(url: str) -> list[Record]:
        async with ServerTarget(url) as target:
            return await run_load(target, plan)

    with ServerThread(FakeEngine(fail_at=2)) as server:
        records = asyncio.run(run(server.url))
    assert all(r.error is not None and "internal_error" in r.error for r in records)


def test_a_server_that_is_not_there() -> None:
    from serve.errors import MergestepError

    plan = LoadPlan(qps=1, num_requests=1)
    with pytest.raises(MergestepError, match=r"cannot reach .*: Connection refused"):
        run_and_report(plan, url="http://127.0.0.1:9", model="", engine=None)


def test_against_an_engine() -> None:
    engine: Any = FakeEngine(repeat=10)
    engine.tokenizer.vocab_size = 256
    engine.tokenizer.special_ids = frozenset({0})
    plan = LoadPlan(qps=math.inf, num_requests=5, input_len=7, output_len=20)

    async def run() -> list[Record]:
        async with EngineTarget(engine) as target:
            assert 0 not in target.prompt_tokens
            return await run_load(target, plan)

    records = asyncio.run(run())
    assert engine.is_stopped
    assert all((r.prompt_tokens, r.output_tokens) == (7, 20) for r in records)
    assert all(len(r.chunks_s) == 20 for r in records)
