"""What the load report prints, writes and leaves out, and the comparison of two reports."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.load.client.record import Outcome, Progress, RunResult
from bench.load.client.redact import command_line, redact
from bench.load.report.compare import compare, parse_share
from bench.load.report.live import LiveView, sparkline
from bench.load.report.report import check_files, report
from bench.load.results.search import find_max_qps
from bench.load.results.slo import Slo
from serve.errors import ConfigError
from tests.support.engine.load_runs import engine_run, queue_run


def written(tmp_path: Path, runs: list[RunResult], **options: Any) -> dict[str, Any]:
    path = tmp_path / "result.json"
    settings = {"qps": "4", "command": "serve bench"}
    report(runs, settings, json_file=path, **options)
    return json.loads(path.read_text())


def printed(runs: list[RunResult], width: int = 120, **options: Any) -> tuple[bool, str]:
    file = io.StringIO()
    is_valid = report(runs, {}, console=Console(file=file, width=width), **options)
    return is_valid, file.getvalue()


def test_the_json_document(tmp_path):
    runs = [engine_run(4.0, count=40, seed=seed) for seed in (1, 2)]
    runs[0].records[0].sent_s = runs[0].records[0].finished_s = math.nan
    runs[0].records[0].chunks_s, runs[0].records[0].chunk_tokens = [], []
    runs[0].records[0].outcome = Outcome.INCOMPLETE
    document = written(tmp_path, runs, slo=Slo(ttft_s=0.2))
    assert (document["format"], document["version"]) == ("mergestep-bench", 1)
    assert document["command"] == "serve bench" and document["settings"] == {"qps": "4"}
    assert {"cpu", "cores", "memory_gib", "os", "python", "packages"} <= set(document["machine"])
    assert document["machine"]["packages"]["numpy"] and document["created"][:2] == "20"
    (rate,) = document["rates"]
    assert rate["latencies_ms"]["ttft_schedule"]["p99"] == [None, None, None], "40 answers a run"
    value, low, high = rate["latencies_ms"]["ttft_schedule"]["p95"]
    assert low < value < high and rate["qps"] == 4 and len(rate["runs"]) == 2
    assert (
        rate["runs"][0]["good"]
        <= rate["runs"][0]["judged"]
        == document["rates"][0]["runs"][0]["counts"]["counted"]
        - document["rates"][0]["runs"][0]["counts"]["cancelled"]
    )
    run = document["runs"][1]
    assert "chunks_s" not in json.dumps(run)
    assert all(len(column) == 40 for column in run["requests"].values())
    assert run["requests"]["first_chunk_s"][3] == pytest.approx(
        runs[1].records[3].chunks_s[0], abs=1e-6
    )
    assert document["runs"][0]["requests"]["sent_s"][0] is None
    assert len(run["steps"]["num_decodes"]) == len(runs[1].steps)


def test_infinite_rates_are_json_too(tmp_path):
    run = queue_run(5.0, 0, count=20)
    run.qps = math.inf
    document = written(tmp_path, [run])
    assert document["rates"][0]["qps"] == "inf" and document["runs"][0]["qps"] == "inf"
    path = tmp_path / "requests.jsonl"
    report([run], {}, jsonl_file=path)
    assert json.loads(path.read_text().splitlines()[0])["qps"] == "inf"


def test_the_jsonl_has_every_request_with_its_chunks(tmp_path):
    runs = [engine_run(4.0, count=30, seed=seed) for seed in (1, 2)]
    runs[0].records[1].sent_s = math.nan
    path = tmp_path / "requests.jsonl"
    report(runs, {}, jsonl_file=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["seed"], line["index"]) for line in lines] == [
        (seed, index) for seed in (1, 2) for index in range(30)
    ]
    assert lines[5]["chunks_s"] == runs[0].records[5].chunks_s
    assert lines[5]["outcome"] == str(runs[0].records[5].outcome)
    assert lines[1]["sent_s"] is None


SECRETS = ("hunter2", "abcd1234efgh", "topsecret")


def test_secrets_are_nowhere(tmp_path):
    run = engine_run(6.0, count=40)
    run.target = "https://me:hunter2@example.org/v1?api_key=topsecret"
    run.notes = ["asked http://me:hunter2@example.org/metrics"]
    for record in run.records[10:12]:
        record.outcome = Outcome.FAILED
        record.error = "401: wrong key sk-abcd1234efgh, Authorization: Bearer abcd1234efgh"
    settings = {
        "url": run.target,
        "api_key": "abcd1234efgh",
        "headers": {"Authorization": "Bearer abcd1234efgh"},
        "max_tokens": 7,
        "command": f"serve bench --url {run.target} --api-key abcd1234efgh --api-key='topsecret'",
    }
    names = {kind: tmp_path / f"out.{kind}" for kind in ("json", "jsonl", "html")}
    file = io.StringIO()
    report(
        [run],
        settings,
        console=Console(file=file, width=200),
        **{f"{kind}_file": path for kind, path in names.items()},
    )
    texts = [file.getvalue(), *(path.read_text() for path in names.values())]
    assert not [secret for secret in SECRETS for text in texts if secret in text]
    assert all("example.org" in text for text in (texts[0], texts[1], texts[3]))
    assert json.loads(texts[1])["settings"]["max_tokens"] == 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://a:b@c/d", "http://c/d"),
        ("http://c/d?x=1&token=z9#f", "http://c/d?x=1&token=***#f"),
        ("--api-key x --qps 4", "--api-key *** --qps 4"),
        ("--header 'X-My: it'\"'\"'s' --header=A:b --qps 4", "--header *** --header=*** --qps 4"),
        ("--api-key-file f --qps 4", "--api-key-file f --qps 4"),
        ("--max-tokens 4 --input-tokens 7", "--max-tokens 4 --input-tokens 7"),
        ("1,000 tokens came", "1,000 tokens came"),
        ("mail me@example.org", "mail me@example.org"),
    ],
)
def test_redaction(text, expected):
    assert redact(text) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--header=Authorization: Token abcdef12345", "--qps", "4"], "--header=*** --qps 4"),
        (["--header", "X-Api-Key: abc def123", "-H", "a: b c"], "--header *** -H ***"),
        (["--header=X-Api-Key: it's abc", "--json", "a b"], "--header=*** --json 'a b'"),
        (["--api-key", "--qps", "--hf-token=a b"], "--api-key *** --hf-token=***"),
        (["--url", "http://me:pw@h/v1?token=z9"], "--url 'http://h/v1?token=***'"),
        (["-HX-Key: a b", "--api-key-file", "f", "-h"], "-H*** --api-key-file f -h"),
        (["--max-tokens", "4", "--x-secret"], "--max-tokens 4 --x-secret"),
    ],
)
def test_the_command_line_has_no_secrets(words, expected):
    assert command_line(words) == expected
    assert redact(expected) == expected, "it is left as it is when it is written"


def test_secrets_of_this_command_line_are_not_written(tmp_path, monkeypatch):
    words = ["--header=Authorization: Token abcdef12345", "--header", "X-Api-Key: abc def123"]
    monkeypatch.setattr(sys, "argv", ["serve", "bench", *words, "--qps", "4"])
    path = tmp_path / "a.json"
    report([queue_run(5.0, 0, count=20)], {}, json_file=path)
    assert (
        json.loads(path.read_text())["command"] == "serve bench --header=*** --header *** --qps 4"
    )


def test_the_tables():
    runs = [engine_run(qps, count=40, seed=seed) for qps in (4.0, 8.0) for seed in (1, 2)]
    runs[0].records[20].outcome = Outcome.FAILED
    runs[0].records[20].error = "503: [b]no memory[/b] & more"
    is_valid, text = printed(runs, slo=Slo(ttft_s=0.2, tpot_s=0.05))
    assert is_valid
    assert "4 requests/s, 2 runs" in text and "all rates" in text
    assert "TTFT from schedule" in text and "ITL (per token)" in text
    assert "goodput (TTFT 200 ms, TPOT 50 ms, from schedule)" in text
    assert "1 time: 503: [b]no memory[/b] & more" in text


def test_an_invalid_run_says_why():
    run = queue_run(5.0, 0, count=300)
    for record in run.records:
        record.sent_s += 0.02
    run.notes.append("[bold] is no markup")
    is_valid, text = printed([run])
    assert not is_valid
    assert "INVALID: the generator fell behind its schedule: dispatch lag p99 20.0 ms" in text
    assert "note: [bold] is no markup" in text


def test_the_search_is_reported(tmp_path):
    runs: list[RunResult] = []

    def run(qps: float, seed: int) -> RunResult:
        runs.append(queue_run(qps, seed, count=300))
        return runs[-1]

    slo = Slo(e2e_s=0.5)
    search = find_max_qps(run, slo, attainment=0.9, resolution=0.1)
    document = written(tmp_path, runs, slo=slo, search=search)
    assert document["search"]["max_qps"] == search.max_qps
    assert len(document["search"]["tried"]) == len(search.tried) == len(document["rates"])
    assert str(search) in printed(runs, width=300, slo=slo, search=search)[1]


def test_files_that_cannot_be_written_are_refused_before(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--json: there is no folder"):
        check_files(json_file=tmp_path / "none" / "a.json")
    with pytest.raises(ConfigError, match=r"--html: .* is a folder"):
        check_files(html_file=tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    check_files(json_file=tmp_path / "a.json", jsonl_file=tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"mergestep\[plots\]"):
        check_files(png_file=tmp_path / "a.png")


def test_json_needs_no_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert written(tmp_path, [queue_run(5.0, 0, count=20)])["rates"]


def slower(run: RunResult, factor: float) -> RunResult:
    for record in run.records:
        record.chunks_s = [
            record.sent_s + factor * (at_s - record.sent_s) for at_s in record.chunks_s
        ]
    return run


@pytest.fixture
def results(tmp_path):
    """Writes a result, one with other seeds, and one whose answers took 1.5 times as long."""
    paths = [tmp_path / f"{name}.json" for name in ("first", "again", "slow")]
    for place, path in enumerate(paths):
        seeds = range(3) if place == 0 else range(10, 13)
        runs = [engine_run(6.0, count=100, seed=seed) for seed in seeds]
        if path.stem == "slow":
            runs = [slower(run, 1.5) for run in runs]
        report(runs, {"qps": 6, "json": str(path)}, slo=Slo(e2e_s=5.0), json_file=path)
    return paths


def compared(*paths: Path, **options: Any) -> tuple[bool, str]:
    file = io.StringIO()
    good = compare(paths, console=Console(file=file, width=160), **options)
    return good, file.getvalue()


def test_compare(results):
    first, again, slow = results
    good, text = compared(first, again, fail_over="10%")
    assert good and "warning" not in text and "nothing is more than 10 % worse" in text
    good, text = compared(first, slow, fail_over="10%")
    assert not good and "REGRESSION: 6/s TPOT p50 is" in text
    assert "apart" in text and "overlap" in text
    assert compared(first, slow)[0], "nothing was asked of it"
    assert compared(first, slow, fail_over="0.9")[0]
    assert compared(slow, first, fail_over="10%")[0], "better is no regression"
    assert not compared(first, again, slow, fail_over="10%")[0]


def test_compare_warns_of_other_settings_and_machines(results):
    first, again, _ = results
    document = json.loads(again.read_text())
    document["settings"]["qps"] = 7
    document["machine"]["cpu"] = "another"
    document["rates"][0]["is_valid"] = False
    again.write_text(json.dumps(document))
    good, text = compared(first, again, fail_over="10%")
    assert "settings: qps is 6 and 7" in text
    assert "machine: cpu is" in text and "INVALID" in text
    assert not good, "what must not be used passes no test"
    document["rates"] *= 2
    for rate in document["rates"]:
        rate["qps"] = 99
    del document["settings"]["qps"]
    again.write_text(json.dumps(document))
    good, text = compared(first, again, fail_over="10%")
    assert "no rate in common" in text and "settings: qps is 6 and the default" in text
    assert not good


def test_compare_pictures(results, tmp_path):
    html, png = tmp_path / "c.html", tmp_path / "c.png"
    compared(*results, html_file=html, png_file=png)
    assert html.read_text().count("<svg") == 1 and "again against first" in html.read_text()
    assert "<th>first</th><th>again</th><th>ratio</th>" in html.read_text()
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_bad_files_to_compare(results, tmp_path):
    other = tmp_path / "other.json"
    for text in ("{", "[]", '{"format": "x"}', '{"format": "mergestep-bench", "version": 9}'):
        other.write_text(text)
        with pytest.raises(ConfigError, match=r"other\.json"):
            compared(results[0], other)
    whole = json.loads(results[0].read_text())
    missing = {"format": whole["format"], "version": whole["version"]}
    for document, match in (
        (missing, r"other\.json .* rates is missing"),
        ({**whole, "rates": 5}, r"other\.json"),
        ({**whole, "rates": [{"qps": 6.0}]}, r"other\.json .* is missing"),
        ({**whole, "rates": [None]}, r"other\.json"),
        ({**whole, "search": {"tried": []}}, r"other\.json .* max_qps is missing"),
    ):
        other.write_text(json.dumps(document))
        with pytest.raises(ConfigError, match=match):
            compared(results[0], other)
    other.write_text(json.dumps({**whole, "runs": [{}]}))
    assert compared(results[0], other)[0], "nothing of the runs is compared"
    with pytest.raises(ConfigError, match=r"other\.json"):
        compared(results[0], other, html_file=tmp_path / "c.html")
    with pytest.raises(ConfigError, match="at least two"):
        compared(results[0])
    with pytest.raises(ConfigError):
        compared(results[0], tmp_path / "none.json")
    for text in ("x", "-1", "10%%", "nan"):
        with pytest.raises(ConfigError, match="fail-over"):
            parse_share(text)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def live_text(*, terminal: bool) -> str:
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
    with LiveView(console, total=40, qps=10.0, title="a [server]", clock=clock) as view:
        for second in range(4):
            clock.now_s = float(second)
            view.update(
                Progress(
                    clock.now_s,
                    40,
                    num_sent=10 * second,
                    num_done=5 * second,
                    num_failed=second,
                    num_running=5,
                    num_tokens=100 * second,
                    ttfts_s=[0.1 * (second + 1)],
                )
            )
    return file.getvalue()


def test_the_live_view():
    last = live_text(terminal=True).rpartition("a [server]")[2]
    assert "30 of 40" in last and "10/s" in last and "5.0/s" in last
    assert "100 tokens/s" in last and "250 ms" in last
    assert "█" in last


def test_the_live_view_is_quiet_without_a_terminal():
    assert live_text(terminal=False) == ""


def test_sparkline():
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert sparkline([0, 0]) == "▁▁" and sparkline([]) == ""


def test_few_answers_have_a_labelled_maximum_and_no_p99(tmp_path):
    """18 requests make no p99: not in the table, the summary of rates, the file or a comparison."""
    runs = [engine_run(qps, count=18, seed=1) for qps in (4.0, 8.0)]
    document = written(tmp_path, runs)
    stats = document["rates"][0]["latencies_ms"]["ttft_schedule"]
    count = int(stats["count"][0])
    assert 10 <= count < 20
    assert stats["p99"] == stats["p95"] == [None, None, None]
    assert stats["p90"][0] is not None and stats["max"][0] >= stats["p90"][0]
    _, text = printed(runs, width=200)
    assert f"(n {count})" in text and "max " in text
    assert "a percentile needs enough values (p95 20, p99 100)" in text
    enough = [engine_run(4.0, count=300, seed=1)]
    _, text = printed(enough, width=200)
    assert "a percentile needs" not in text and "(n " not in text
    written(tmp_path, runs[:1])
    file = io.StringIO()
    path = tmp_path / "result.json"
    compare([path, path], console=Console(file=file, width=200))
    assert "TTFT schedule max" in file.getvalue() and "TTFT schedule p99" not in file.getvalue()
