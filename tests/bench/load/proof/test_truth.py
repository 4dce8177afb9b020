"""The proof of the load generator: expected records by hand, and detection of wrong figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import uvloop

from bench.load.client.record import RunResult
from bench.load.proof.fake_script import Fault, Profile, after_stall, index_of, prompt_of, script_of
from bench.load.proof.truth import (
    Row,
    check,
    compare,
    schedule_of,
    true_latencies_s,
    true_records,
)
from bench.load.results.summary import summarize
from bench.load.workload.work import Schedule, Work

pytestmark = pytest.mark.timing

PLAIN = Profile(
    first_s=(0.1, 0.1),
    gap_s=(0.05, 0.05),
    chunks=(3, 3),
    chunk_tokens=(2, 2),
    prompt_tokens=(7, 7),
    empty_first_rate=0.0,
)


def at(*arrivals_s: float) -> Schedule:
    works = [Work(prompt=prompt_of(i)) for i in range(len(arrivals_s))]
    return Schedule(1.0, works, list(arrivals_s))


def test_scripts_follow_from_seed_and_number() -> None:
    profile = Profile(seed=5, fault_rate=0.1)
    assert script_of(profile, 3) == script_of(profile, 3)
    assert script_of(profile, 3) != script_of(profile, 4)
    assert script_of(profile, 3) != script_of(replace(profile, seed=6), 3)
    faults = [script_of(profile, index).fault for index in range(3000)]
    for fault in (Fault.REFUSED, Fault.BROKEN, Fault.ERROR):
        assert 0.07 < faults.count(fault) / 3000 < 0.13
    assert index_of(b'{"prompt":"fake-12"}') == 12 and index_of(b'{"prompt":"Hi"}') is None


def test_truth_by_hand() -> None:
    latencies = true_latencies_s(true_records(PLAIN, at(0.0, 0.5)))
    assert latencies["ttft_send"] == pytest.approx([0.1, 0.1])
    assert latencies["tpot"] == pytest.approx([0.1 / 5] * 2)
    assert latencies["icl"] == pytest.approx([0.05] * 4)
    assert latencies["e2e_schedule"] == pytest.approx([0.2, 0.2])


def test_a_stall_by_hand() -> None:
    profile = replace(PLAIN, stall_at_s=1.0, stall_s=2.0)
    assert [after_stall(profile, at_s) for at_s in (0.9, 1.0, 2.9, 3.0)] == [0.9, 3.0, 3.0, 3.0]
    records = true_records(profile, at(0.5, 1.38, 2.5, 3.5))  # the stall is from 1.5 to 3.5
    assert records[1].chunks_s == pytest.approx([1.48, 3.5, 3.5])
    assert records[2].chunks_s == pytest.approx([3.5, 3.5, 3.5])
    assert records[3].chunks_s == pytest.approx([3.6, 3.65, 3.7])


def test_a_closed_loop_by_hand() -> None:
    records = true_records(PLAIN, at(0.0, 0.01, 0.02, 1.0), slots=2)
    assert [record.sent_s for record in records] == pytest.approx([0.0, 0.01, 0.2, 1.0])
    latencies = true_latencies_s(records)
    assert latencies["ttft_send"] == pytest.approx([0.1] * 4)
    assert latencies["ttft_schedule"] == pytest.approx([0.1, 0.1, 0.28, 0.1])


def shifted(late_s: float) -> list[Row]:
    """Compares a run whose answers are later than the expected ones."""
    profile = Profile()
    schedule = schedule_of(100, 200, seed=0)
    truth = true_records(profile, schedule)
    records = true_records(profile, schedule)
    for record in records:
        record.dispatched_s = record.sent_s
        record.chunks_s = [at_s + late_s for at_s in record.chunks_s]
        record.finished_s += late_s
    result = RunResult(100, 0, "x", records, (0.0, 10.0))
    return compare(result, summarize(result), truth)


def test_a_true_run_is_found_true() -> None:
    assert all(row.is_ok for row in shifted(0.0))


def test_a_wrong_figure_is_found() -> None:
    wrong = [row.name for row in shifted(0.005) if not row.is_ok]
    assert "TTFT from send p50" in wrong and "E2E from schedule p99" in wrong
    assert not any(name.startswith(("ICL", "TPOT", "answered")) for name in wrong)


def test_a_short_run() -> None:
    """The server runs in a process of its own; bounds on times are loose for slow machines."""
    profile = Profile(fault_rate=0.02)
    found = uvloop.run(check("short", profile, schedule_of(50, 50, seed=2)))
    rows = {row.name: row for row in found.rows}
    for name in ("answered", "failed", "input tokens"):
        assert rows[name].is_ok, name
    assert rows["failed"].truth > 0
    assert "TTFT from send p50" in rows and "TTFT from send p99" not in rows, "50 answers"
    for row in found.rows:
        if row.unit == "ms":
            assert -2 < row.measured - row.truth < 200, row.name
    assert "server late p99" in found.server
