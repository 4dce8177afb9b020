"""Traces: their formats, and the generators of published ones."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from bench.load.workload.published import BLOCK, PUBLISHED, Marginal, Published, published_calls
from bench.load.workload.traces import Part, read_trace
from bench.load.workload.work import Call, cut_runs, fit_context, fit_lengths
from bench.simulate.memory_policy import published_trace
from serve.errors import ConfigError

MOONCAKE = """\
{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}

{"timestamp": 1500, "input_length": 600, "output_length": 6, "hash_ids": [7, 10]}
{"timestamp": 4000, "input_length": 30, "output_length": 7}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:00,12,1"""  # no newline at the end, as the public file
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens,NumImages
2024-05-10 00:00:00.009930+00:00,2162,5,0
2024-05-10 02:00:00.017335+02:00,2399,6,1
"""
BURST = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
118,GPT-4,417,276,693,Conversation log
"""
BURST_SESSIONS = (
    "\ufeff"
    """\
Timestamp(s),Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82,43,GPT-4,906,446,1352,API log
19440161.5,,2,ChatGPT,36,29,65,"API, log"
"""
)


ALL = Part()


def read(
    directory: Path, name: str, text: str, part: Part = ALL, **options: int
) -> tuple[list[Call], list[str]]:
    path = directory / "trace"
    path.write_text(text)
    notes: list[str] = []
    return read_trace(name, path, part, notes, **options), notes


def test_mooncake(tmp_path: Path) -> None:
    calls, notes = read(tmp_path, "mooncake", MOONCAKE)
    assert calls == [
        Call(1100, 5, at_s=1.0, runs=((7, 512), (8, 512), (9, 76))),
        Call(600, 6, at_s=1.5, runs=((7, 512), (10, 88))),
        Call(30, 7, at_s=4.0),
    ]
    assert not notes


def test_mooncake_with_other_blocks_and_whole_ones_only(tmp_path: Path) -> None:
    text = '{"timestamp": 0, "input_length": 50, "output_length": 1, "hash_ids": [1, 2, 3]}'
    calls, _ = read(tmp_path, "mooncake", text, block_size=16)
    assert calls[0].runs == ((1, 16), (2, 16), (3, 16)), "two tokens are its own"


def test_azure(tmp_path: Path) -> None:
    calls, _ = read(tmp_path, "azure", AZURE)
    assert [(call.num_prompt, call.num_output) for call in calls] == [
        (374, 44),
        (396, 109),
        (12, 1),
    ]
    first, second, third = (call.at_s for call in calls)
    assert second - first == pytest.approx(4.314579, abs=1e-5)
    assert third - first == pytest.approx(13.31941, abs=1e-5)
    assert first == pytest.approx(1700158546.68059), "UTC, wherever this runs"


def test_azure_with_zones_and_more_columns(tmp_path: Path) -> None:
    calls, _ = read(tmp_path, "azure", AZURE_2024)
    assert calls[1].at_s - calls[0].at_s == pytest.approx(0.007405, abs=1e-5)


def test_burstgpt(tmp_path: Path) -> None:
    calls, notes = read(tmp_path, "burstgpt", BURST)
    assert calls == [
        Call(472, 18, at_s=5, client="ChatGPT"),
        Call(417, 276, at_s=118, client="GPT-4"),
    ]
    assert len(notes) == 1 and notes[0].endswith("answer: 1")
    calls, notes = read(tmp_path, "burstgpt", BURST_SESSIONS)
    assert calls[0] == Call(906, 446, at_s=19440110, client="GPT-4", group="1722ac82")
    assert calls[1].group is None and not notes


def test_a_part_of_a_trace(tmp_path: Path) -> None:
    """A window is in seconds after the file's first row, and its end is not included."""
    at = [call.at_s for call in read(tmp_path, "mooncake", MOONCAKE, Part(start_s=0.5))[0]]
    assert at == [1.5, 4.0]
    at = [call.at_s for call in read(tmp_path, "mooncake", MOONCAKE, Part(end_s=3.0))[0]]
    assert at == [1.0, 1.5]
    at = [call.at_s for call in read(tmp_path, "mooncake", MOONCAKE, Part(count=1))[0]]
    assert at == [1.0]
    with pytest.raises(ConfigError, match="the selected part has no request"):
        read(tmp_path, "mooncake", MOONCAKE, Part(start_s=9))


def test_only_as_much_is_read_as_is_wanted(tmp_path: Path) -> None:
    calls, _ = read(tmp_path, "mooncake", MOONCAKE + "broken\n", Part(count=3))
    assert len(calls) == 3


def test_rows_out_of_order_are_sorted(tmp_path: Path) -> None:
    text = "".join(reversed(MOONCAKE.splitlines(keepends=True)))
    at = [call.at_s for call in read(tmp_path, "mooncake", text)[0]]
    assert at == [1.0, 1.5, 4.0]


@pytest.mark.parametrize(
    ("name", "text", "line", "said"),
    [
        ("mooncake", '{"timestamp": 0\n', 1, "not JSON"),
        ("mooncake", "[1]", 1, "object"),
        ("mooncake", MOONCAKE + '{"timestamp": 0, "input_length": 3}', 5, "output_length"),
        ("mooncake", MOONCAKE + '{"input_length": 1.5, "output_length": 3}', 5, "input_length"),
        ("mooncake", '{"timestamp": "0", "input_length": 5, "output_length": 3}', 1, "timestamp"),
        ("mooncake", '{"input_length": 5, "output_length": 3, "hash_ids": ["a"]}', 1, "hash_ids"),
        ("mooncake", '{"input_length": 5, "output_length": 3, "hash_ids": [1, 2]}', 1, "block"),
        ("azure", AZURE + "\n2023-11-16 18:15:46,1", 5, "2 columns"),
        ("azure", AZURE + "\nyesterday,1,2", 5, "yesterday"),
        ("azure", AZURE + "\n2023-11-16 18:15:46,1.5,2", 5, "contexttokens"),
        ("azure", AZURE + "\n2023-11-16 18:15:46,-1,2", 5, "contexttokens"),
        ("azure", BURST, 2, "no column 'timestamp'|no column 'contexttokens'|Invalid"),
        ("burstgpt", BURST + "nan,a,1,2,3,b\n", 5, "timestamp"),
        ("burstgpt", BURST + "soon,a,1,2,3,b\n", 5, "soon"),
        ("burstgpt", AZURE, 2, "float|column"),
    ],
)
def test_a_malformed_line_is_named(
    tmp_path: Path, name: str, text: str, line: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"trace:{line}: .*({said})"):
        read(tmp_path, name, text)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot read {path}"):
            read_trace("azure", path, Part(), [])
    with pytest.raises(ConfigError, match="no request"):
        read(tmp_path, "azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary:1"):
        read_trace("azure", tmp_path / "binary", Part(), [])


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("seed", [0, 1])
def test_published_lengths(name: str, seed: int) -> None:
    """Generated lengths have the published means within 1 %, and the medians."""
    trace = PUBLISHED[name]
    calls = published_calls(trace, 10_000, seed)
    for wanted, lengths in (
        (trace.prompt, [call.num_prompt for call in calls]),
        (trace.output, [call.num_output for call in calls]),
    ):
        assert np.mean(lengths) == pytest.approx(wanted.mean, rel=0.01)
        assert np.median(lengths) == pytest.approx(wanted.median, rel=0.01, abs=0.6)
        assert min(lengths) >= 1


def test_the_published_figures() -> None:
    """The table in docs/workloads.md compares with mean and median of the public files."""
    found = {
        name: (t.num_requests, t.prompt.mean, t.output.mean, t.prompt.median, t.output.median)
        for name, t in PUBLISHED.items()
    }
    assert found["azure-conv"] == pytest.approx((19366, 1154.7, 211.1, 1020, 129))
    assert found["azure-code"] == pytest.approx((8819, 2047.8, 27.9, 1469, 13))
    assert found["kimi-conv"] == pytest.approx((12031, 12035.1, 342.6, 6909, 350))
    assert found["kimi-ta"][:3] == (23608, 8560.0, 182.1)


def test_tails_of_a_published_trace() -> None:
    prompts = [call.num_prompt for call in published_calls(PUBLISHED["azure-conv"], 20_000, 0)]
    for percent, value in ((10, 207), (90, 2734), (99, 4142)):
        assert np.percentile(prompts, percent) == pytest.approx(value, rel=0.02)


def test_another_seed_gives_another_order_of_the_same_lengths() -> None:
    first, second = (published_calls(PUBLISHED["azure-conv"], 500, seed) for seed in (0, 1))
    assert first == published_calls(PUBLISHED["azure-conv"], 500, 0)
    assert [c.num_prompt for c in first] != [c.num_prompt for c in second]
    assert sorted(c.num_prompt for c in first) == sorted(c.num_prompt for c in second)


@pytest.mark.parametrize(("name", "expected"), [("kimi-conv", 0.374), ("kimi-ta", 0.59)])
@pytest.mark.parametrize("count", [1000, 12_000])
def test_prompts_share_beginnings_as_published(name: str, expected: float, count: int) -> None:
    """Returns the share of prompt tokens that a prefix cache without eviction has."""
    seen: set[int] = set()
    reused = total = 0
    for call in published_calls(PUBLISHED[name], count, 3):
        assert sum(length for _, length in call.runs) <= call.num_prompt
        for key, length in call.runs:
            if key not in seen:
                break
            reused += length
        seen.update(key for key, _ in call.runs)
        total += call.num_prompt
    assert reused / total == pytest.approx(expected, abs=0.03 if count > 1000 else 0.06)


def test_equal_blocks_follow_equal_blocks() -> None:
    """A hash id stands for all tokens up to the end of its block."""
    before: dict[int, tuple[int, ...]] = {}
    for call in published_calls(PUBLISHED["kimi-conv"], 2000, 0):
        keys = tuple(key for key, _ in call.runs)
        assert all(length == BLOCK for _, length in call.runs)
        for i, key in enumerate(keys):
            assert before.setdefault(key, keys[:i]) == keys[:i]


def test_clients_answers_resemble_each_other() -> None:
    calls = published_calls(PUBLISHED["azure-conv"], 20_000, 0)
    by_client: dict[str, list[float]] = {}
    for call in calls:
        by_client.setdefault(call.client or "", []).append(math.log(call.num_output or 1))
    overall = np.var([value for values in by_client.values() for value in values])
    within = sum(np.var(values) * len(values) for values in by_client.values()) / len(calls)
    assert len(by_client) == 24
    assert 0.5 < within / overall < 0.85


def test_max_tokens_of_clients() -> None:
    """A third of the requests send max_tokens, which cut few answers and fit the context."""
    calls = published_calls(PUBLISHED["azure-conv"], 5000, 0)
    sent = [call for call in calls if call.max_tokens is not None]
    assert {call.max_tokens for call in sent} <= {64, 256, 1024, 4096, 16384}
    assert 0.1 < len(sent) / len(calls) < 0.5
    assert sum(call.num_output > call.max_tokens for call in sent) < 0.06 * len(sent)
    for call in published_trace(PUBLISHED["azure-conv"], 500, 2048):
        assert call.max_tokens is not None and call.num_prompt + call.max_tokens <= 2048
        assert call.num_prompt <= 1024


def test_lognormal_marginal() -> None:
    lengths = Marginal.lognormal(1000, 600).lengths(np.random.default_rng(0).normal(size=20_000))
    assert np.mean(lengths) == pytest.approx(1000, rel=1e-3)
    assert np.median(lengths) == pytest.approx(600, rel=1e-2)
    sigma = math.sqrt(2 * math.log(1000 / 600))
    assert np.std(np.log(lengths)) == pytest.approx(sigma, rel=0.02)


def test_lengths_keep_the_order_of_the_scores() -> None:
    scores = np.array([0.3, -2.0, 1.5, 0.0])
    lengths = PUBLISHED["azure-conv"].prompt.lengths(scores)
    assert np.array_equal(np.argsort(lengths), np.argsort(scores))


def test_one_request() -> None:
    trace = Published(Marginal.lognormal(50, 40), Marginal.lognormal(9, 8), num_requests=1)
    assert len(published_calls(trace, 1, 0)) == 1


def test_cutting_to_the_context() -> None:
    assert fit_lengths(100, 20, 120) == (100, 20)
    assert fit_lengths(100, 60, 120) == (60, 60)
    assert fit_lengths(200, 20, 120) == (100, 20)
    assert fit_lengths(20, 200, 120) == (20, 100)
    assert cut_runs(((1, 10), (2, 10)), 15) == ((1, 10), (2, 5))
    notes: list[str] = []
    calls = fit_context([Call(10, 5), Call(90, 20, runs=((1, 64), (2, 26)))], 100, notes)
    assert calls == [Call(10, 5), Call(80, 20, runs=((1, 64), (2, 16)))]
    assert notes == ["requests cut to max_model_len 100: 1"]
