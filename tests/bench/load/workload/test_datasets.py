"""The requests of data sets, and the schedules that are made of them."""

from __future__ import annotations

import json
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.load.workload.datasets import DatasetSettings, load_calls
from bench.load.workload.mixed import (
    NUM_WARM_UP,
    mixed_requests,
    num_mixed,
    warm_up_requests,
)
from bench.load.workload.prompts import WORDS, make_works, random_run
from bench.load.workload.schedule import ArrivalSettings, make_calls, make_schedule, make_warm_up
from bench.load.workload.work import Call, Work
from serve.errors import ConfigError

TOKENS = range(40, 90)
POISSON = ArrivalSettings()
TRACE = "\n".join(
    json.dumps({"timestamp": 1000 * i, "input_length": 20, "output_length": 2 + i, "hash_ids": ids})
    for i, ids in enumerate([[0, 1], [0, 2], [3, 4], [0, 1]])
)


def trace_file(directory: Path) -> str:
    (directory / "m").write_text(TRACE)
    return f"mooncake:{directory / 'm'}"


def works_of(name: str, count: int = 5, seed: int = 0, **settings: Any) -> list[Work]:
    dataset = DatasetSettings(name, **settings)
    schedule, _ = make_schedule(dataset, POISSON, qps=1, requests=count, seed=seed, tokens=TOKENS)
    return schedule.works


def common_start(first: list[Any], second: list[Any]) -> int:
    same = [a == b for a, b in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)


def test_random_has_the_lengths_and_tokens_asked_for() -> None:
    works = works_of("random", input_len="9", output_len="3")
    assert all(len(work.token_ids) == 9 and work.max_tokens == 3 for work in works)
    assert all(work.ignore_eos for work in works)
    assert {token for work in works for token in work.token_ids} <= set(TOKENS)
    assert works == works_of("random", input_len="9", output_len="3")
    assert works_of("random", input_len="9")[0].max_tokens == 128


def test_random_ranges() -> None:
    works = works_of("random", 2000, input_len="2:5", output_len="lognormal:50:20")
    assert {len(work.token_ids) for work in works} == {2, 3, 4, 5}
    outputs = [work.max_tokens for work in works]
    assert np.mean(outputs) == pytest.approx(50, rel=0.01)
    assert np.median(outputs) == pytest.approx(20, abs=0.6)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "random", "input_len": "30"},
        {"name": "prefix"},
        {"name": "mixed"},
        {"name": "azure-conv"},
        {"name": "kimi-conv", "max_model_len": 2048},
    ],
)
def test_another_seed_gives_other_prompts(settings: dict[str, Any]) -> None:
    """Runs with other seeds and the warm-up share no prefix in a server's cache."""
    dataset = DatasetSettings(**settings)
    runs = [works_of(count=8, seed=seed, **settings) for seed in (0, 1)]
    runs.append(make_warm_up(dataset, 8, 0, TOKENS))
    begins = [{str(work.messages or work.token_ids[:12]) for work in works} for works in runs]
    assert not begins[0] & begins[1] and not begins[0] & begins[2]
    assert runs[0] == works_of(count=8, seed=0, **settings)


def test_mixed_takes_other_seeds_in_another_order_and_repeats_itself() -> None:
    """Seed 0 has the order of the file. A note says that a load larger than the file repeats it."""
    first, other = mixed_requests(0, num_mixed()), mixed_requests(1, num_mixed())
    assert mixed_requests(0, 10) == first[:10]
    assert first != other
    assert sorted(map(str, first)) == sorted(map(str, other))
    assert mixed_requests(0, num_mixed() + 1)[:-1] == first
    warm_up = {str(messages) for messages in warm_up_requests(NUM_WARM_UP)}
    assert len(warm_up) > 1 and not warm_up & set(map(str, first))
    notes: list[str] = []
    assert len(load_calls(DatasetSettings("mixed"), 2001, 0, notes)) == 2001
    assert notes == ["mixed has 1,936 different requests, which are repeated"]


def test_mixed_is_conversations() -> None:
    works = works_of("mixed", output_len="7")
    assert all(work.messages[-1]["role"] == "user" and work.max_tokens == 7 for work in works)
    assert not any(work.ignore_eos for work in works)
    assert all(work.ignore_eos for work in works_of("mixed", output_len="7", ignore_eos=True))


def test_prefix_turns_grow_and_groups_begin_alike() -> None:
    settings = {"num_groups": 2, "prefix_len": 30, "num_turns": 3}
    works = works_of("prefix", 12, input_len="5", output_len="4", **settings)
    sessions: dict[str, list[Work]] = {}
    for work in works:
        sessions.setdefault(work.group, []).append(work)
    assert len(sessions) == 4
    for turns in sessions.values():
        assert [len(turn.token_ids) for turn in turns] == [35, 44, 53]
        for before, after in pairwise(turns):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
    begins = {(turns[0].client, tuple(turns[0].token_ids[:30])) for turns in sessions.values()}
    assert len(begins) == 2, "one beginning for each group"
    questions = [tuple(turns[0].token_ids[30:]) for turns in sessions.values()]
    assert len(set(questions)) == 4, "each session asks something else"
    assert [work.group for work in works] != sorted(work.group for work in works)


def test_equal_hash_ids_are_equal_tokens(tmp_path: Path) -> None:
    works = works_of(trace_file(tmp_path), 4, block_size=16)
    prompts = [work.token_ids for work in works]
    assert prompts[0] == prompts[3]
    assert common_start(prompts[0], prompts[1]) == 16
    assert common_start(prompts[0], prompts[2]) < 4
    assert [work.max_tokens for work in works] == [2, 3, 4, 5]
    other = works_of(trace_file(tmp_path), 4, seed=1, block_size=16)[0].token_ids
    assert common_start(prompts[0], other) < 4
    text = works_of(trace_file(tmp_path), 4, block_size=16, as_text=True)
    assert text[0].prompt == text[3].prompt
    assert common_start(text[0].prompt.split(), text[1].prompt.split()) == 16


def test_a_shorter_run_is_the_beginning_of_the_longer() -> None:
    for vocabulary in (range(3), range(256), range(151_000)):
        long = random_run("a", 500, vocabulary)
        assert all(random_run("a", n, vocabulary) == long[:n] for n in (1, 2, 7, 100, 499))
        assert long != random_run("b", 500, vocabulary)


def test_text_for_servers_without_token_ids() -> None:
    dataset = DatasetSettings("random", input_len="20", as_text=True)
    schedule, notes = make_schedule(dataset, POISSON, qps=1, requests=2, tokens=TOKENS)
    words = [work.prompt.split() for work in schedule.works]
    assert all(len(own) == 20 and set(own) <= set(WORDS) for own in words)
    assert any("approximate" in note for note in notes)
    assert len(WORDS) == len(set(WORDS)) > 150
    halves = DatasetSettings("prefix", as_text=True, count_tokens=lambda t: 2 * len(t.split()))
    works = make_schedule(halves, POISSON, qps=1, requests=8, tokens=TOKENS)[0].works
    assert sorted({len(work.prompt.split()) for work in works}) == [288, 384, 480, 576]


def sharegpt(directory: Path, content: Any) -> str:
    (directory / "s.json").write_text(json.dumps(content))
    return f"sharegpt:{directory / 's.json'}"


def talk(*turns: tuple[str, str]) -> dict[str, Any]:
    return {
        "id": "x",
        "conversations": [{"from": speaker, "value": text} for speaker, text in turns],
    }


def test_sharegpt(tmp_path: Path) -> None:
    """Only the first question and answer count; short, long and one-sided dialogs do not."""
    name = sharegpt(
        tmp_path,
        [
            talk(("human", "q" * 40), ("gpt", "a" * 80), ("human", "more")),
            talk(("system", "be kind"), ("user", "r" * 41), ("assistant", "b" * 20)),
            talk(("gpt", "a" * 80), ("human", "q" * 40)),
            talk(("human", "q" * 40)),
            talk(),
            talk(("human", "short"), ("gpt", "a" * 80)),
            talk(("human", "q" * 4100), ("gpt", "a" * 80)),
            talk(("human", "q" * 4000), ("gpt", "a" * 4300)),
        ],
    )
    notes: list[str] = []
    calls = load_calls(DatasetSettings(name), None, 0, notes)
    assert sorted((call.num_prompt, call.num_output) for call in calls) == [(10, 20), (11, 5)]
    work = max(calls, key=lambda call: call.num_output).work
    assert work == Work(messages=[{"role": "user", "content": "q" * 40}], max_tokens=20)
    assert any(note.endswith("with the answer): 6") for note in notes)
    assert any("4 characters" in note for note in notes)
    calls = load_calls(DatasetSettings(name, output_len="99", count_tokens=len), None, 0, notes)
    assert {(call.num_prompt, call.num_output) for call in calls} >= {(40, 99), (41, 99), (5, 99)}
    assert len(load_calls(DatasetSettings(name), 1, 0, [])) == 1
    firsts = [load_calls(DatasetSettings(name), 1, seed, [])[0] for seed in range(8)]
    assert len({call.num_prompt for call in firsts}) == 2, "the seed chooses"
    warm_up = make_warm_up(DatasetSettings(name), 2, 0, TOKENS)
    assert sorted(len(work.token_ids) for work in warm_up) == [10, 11]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": 1}, "list"),
        ([{"items": []}], 'conversation 0: no "conversations"'),
        ([talk(("human", "q" * 40), ("gpt", 3))], "conversation 0"),  # type: ignore[arg-type]
        ([talk(("gpt", "q" * 40))], "no request that can be sent"),
    ],
)
def test_what_is_no_sharegpt_file(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_calls(DatasetSettings(sharegpt(tmp_path, content)), 3, 0, [])


def test_sharegpt_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "s").write_text('[\n{"a": 1},\n{]')
    with pytest.raises(ConfigError, match=r"s:3: not JSON"):
        load_calls(DatasetSettings(f"sharegpt:{tmp_path / 's'}"), 3, 0, [])
    with pytest.raises(ConfigError, match="cannot read"):
        load_calls(DatasetSettings(f"sharegpt:{tmp_path / 'none'}"), 3, 0, [])


ROWS = [
    {"prompt": "hello you", "max_tokens": 5, "timestamp": 3},
    {"messages": [{"role": "user", "content": "hi"}], "output_len": 4, "timestamp": 1.5},
    {"token_ids": [1, 2, 3], "client": "me", "group": "ours", "timestamp": 2},
    {"input_len": 6, "output_len": 2, "timestamp": 0},
]


def jsonl(directory: Path, *rows: Any) -> str:
    (directory / "r").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{directory / 'r'}"


def test_jsonl(tmp_path: Path) -> None:
    for row in ROWS:
        row.setdefault("timestamp", 0)
    made, messages, ids, prompt = works_of(jsonl(tmp_path, *ROWS), 4)
    assert len(made.token_ids) == 6 and made.max_tokens == 2 and made.ignore_eos
    assert messages == Work(messages=ROWS[1]["messages"], max_tokens=4, ignore_eos=True)
    assert ids == Work(token_ids=[1, 2, 3], client="me", group="ours")
    assert prompt == Work(prompt="hello you", max_tokens=5)
    assert works_of(jsonl(tmp_path, *ROWS), 4, output_len="8")[2].max_tokens == 8


def test_jsonl_without_all_times_is_in_the_files_order(tmp_path: Path) -> None:
    name = jsonl(tmp_path, *ROWS, {"prompt": "last"})
    assert works_of(name, 9)[0].prompt == "hello you"
    with pytest.raises(ConfigError, match="not every request"):
        make_calls(DatasetSettings(name), ArrivalSettings("trace"), qps=None)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([1], "object"),
        ({"prompt": "a", "colour": 1}, "unknown key 'colour'"),
        ({"max_tokens": 1}, "exactly one of"),
        ({"prompt": "a", "input_len": 3}, "exactly one of"),
        ({"prompt": "a", "max_tokens": 3, "output_len": 3}, "exclude each other"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"prompt": "a", "output_len": "9"}, "output_len"),
        ({"prompt": ""}, "prompt must be text"),
        ({"token_ids": []}, "token_ids must be a list"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"messages": ["a"]}, "messages"),
        ({"input_len": 0}, "input_len must be at least 1"),
        ({"prompt": "a", "timestamp": "1"}, "timestamp"),
        ({"prompt": "a", "client": 3}, "client must be text"),
    ],
)
def test_a_malformed_request_is_named(tmp_path: Path, row: Any, said: str) -> None:
    name = jsonl(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(ConfigError, match=rf"r:2: .*{said}"):
        works_of(name)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "none"},
        {"name": "mixed:file"},
        {"name": "mooncake"},
        {"name": "azure:"},
        {"name": "random"},
        {"name": "random", "input_len": "0"},
        {"name": "random", "input_len": "5:4"},
        {"name": "random", "input_len": "1:2:3"},
        {"name": "random", "input_len": "x"},
        {"name": "random", "input_len": "lognormal:5:6"},
        {"name": "random", "input_len": "lognormal:nan:1"},
        {"name": "random", "input_len": "99999999999"},
        {"name": "mixed", "input_len": "3"},
        {"name": "mixed", "output_len": "3:4"},
        {"name": "azure-conv", "output_len": "3"},
        {"name": "prefix", "num_groups": 0},
        {"name": "prefix", "prefix_len": -1},
        {"name": "azure-conv", "max_model_len": 1},
        {"name": "azure:x", "start_s": 3.0, "end_s": 3.0},
        {"name": "azure:x", "start_s": math.nan},
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_calls(DatasetSettings(**settings), POISSON, qps=1)


@pytest.mark.parametrize(
    ("arrival", "options", "said"),
    [
        (ArrivalSettings("trace"), {"qps": 1}, "needs one of mooncake"),
        (ArrivalSettings("poisson", 2.0), {"qps": 1}, "speedup"),
        (ArrivalSettings("poisson"), {"qps": None}, "needs a qps"),
        (ArrivalSettings("poisson"), {"qps": 0.0}, "qps must be positive"),
        (ArrivalSettings("ramp:1:2"), {"qps": 1}, "own rates"),
        (ArrivalSettings("inf"), {"qps": 1}, "qps inf"),
        (ArrivalSettings("inf"), {"qps": None, "duration_s": 3}, "finite"),
    ],
)
def test_arrivals_that_cannot_work(
    arrival: ArrivalSettings, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_calls(DatasetSettings("azure-conv"), arrival, **options)


def test_a_trace_in_its_own_time(tmp_path: Path) -> None:
    """Times begin at 0. A speedup divides them, a rate stretches them, a duration cuts them."""
    dataset = DatasetSettings(trace_file(tmp_path), block_size=16)

    def times(speedup: float | None = None, **options: Any) -> tuple[float, list[float | None]]:
        offer = make_calls(
            options.pop("dataset", dataset), ArrivalSettings("trace", speedup), **options
        )
        return offer.qps, [call.at_s for call in offer.calls]

    assert times(qps=None) == (pytest.approx(4 / 3), [0, 1, 2, 3])
    assert times(2.0, qps=None) == (pytest.approx(8 / 3), [0, 0.5, 1, 1.5])
    assert times(2.0, qps=None, duration_s=1.0) == (4, [0, 0.5])
    assert times(qps=None, requests=2) == (2, [0, 1])
    assert times(qps=0.5) == (0.5, pytest.approx([0, 8 / 3, 16 / 3, 8]))
    part = DatasetSettings(dataset.name, block_size=16, start_s=1.0, end_s=3.0)
    assert times(dataset=part, qps=None) == (2, [0, 1])
    assert times(qps=None, requests=1) == (math.inf, [0])
    for speedup, qps in ((2.0, 1.0), (0.0, None), (math.inf, None)):
        with pytest.raises(ConfigError, match="speedup"):
            times(speedup, qps=qps)


def test_notes_say_what_was_left_out(tmp_path: Path) -> None:
    dataset = DatasetSettings(trace_file(tmp_path), block_size=16, max_model_len=15)
    notes = make_calls(dataset, ArrivalSettings("trace", 3.0), qps=None).notes
    assert any("max_model_len 15: 4" in note for note in notes)
    assert any("has 4 requests, not 100" in note for note in notes)
    assert any("3 times as fast" in note for note in notes)
    long = DatasetSettings(jsonl(tmp_path, ROWS[0], {"prompt": "x" * 4000}), max_model_len=100)
    notes = make_calls(long, POISSON, qps=1).notes
    assert any("left out" in note for note in notes)


def test_counts() -> None:
    dataset = DatasetSettings("azure-conv", max_model_len=4096)
    assert len(make_calls(dataset, POISSON, qps=2).calls) == 100
    assert len(make_calls(dataset, POISSON, qps=2, duration_s=10).calls) == 20
    ramp = make_calls(dataset, ArrivalSettings("ramp:1:5"), qps=None, duration_s=10)
    assert ramp.qps == 3 and ramp.calls[-1].at_s == pytest.approx(10)
    assert make_calls(dataset, ArrivalSettings("inf"), qps=None, requests=3).calls[2].at_s == 0


def test_a_schedule_that_would_not_fit_into_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer requests"):
        make_works([Call(10**9, 1)], 0, TOKENS)


def test_many_requests_are_cheap() -> None:
    """A million requests must take less than ten seconds; this makes a tenth of them."""
    start_s = time.process_time()
    offer = make_calls(DatasetSettings("azure-conv"), POISSON, qps=100, requests=100_000)
    assert len(offer.calls) == 100_000 and offer.calls[-1].at_s == pytest.approx(1000)
    assert time.process_time() - start_s < 3


def test_made_up_requests_do_not_ask_for_more_than_there_is_room_for():
    """Lengths are fitted to the server's context; texts are sent unchanged."""
    from bench.load.workload.work import Call, Work, fit_context

    text = Call(10, 5, max_tokens=4096, work=Work(prompt="a", max_tokens=4096))
    calls = [Call(100, 50, max_tokens=4096), Call(5000, 50, max_tokens=256), Call(9, 9), text]
    fitted = fit_context(calls, 1024, [])
    assert [call.max_tokens for call in fitted] == [924, 50, None, 4096]
    assert all(c.num_prompt + (c.max_tokens or 0) <= 1024 for c in fitted if c.work is None)
