"""The measurements of dropped K/V, on small sizes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from bench.engine import kv_eviction
from bench.kernels import key_scores


def test_all_parts_take_time(capsys):
    key_scores.main(["--contexts", "64", "--layers", "2", "--repeat", "2", "--rows", "16"])
    printed = capsys.readouterr().out
    assert all(kv_dtype in printed for kv_dtype in ("int8", "bfloat16", "float32"))
    assert min(key_scores.measure(64, 2, 2)) > 0


def test_a_policy_holds_less(monkeypatch):
    monkeypatch.setattr(kv_eviction, "_ANSWER", 12)
    whole, window = (
        asyncio.run(kv_eviction._measure(policy, 2, 300))
        for policy in ("off", "window:budget=32,least=1")
    )
    assert window.pages < whole.pages
    assert (whole.held, window.held <= 2 * (32 + 12)) == (0, True)
    assert min(whole.step_ms, window.step_ms, window.prompt_s) > 0


def test_a_round_whose_sequences_ended_early_is_measured_again(monkeypatch):
    rounds = []
    first_round = kv_eviction._round

    async def late(engine, *sizes):
        rounds.append(engine.stats)
        if len(rounds) == 1:  # as if all deltas were read behind the last step
            monkeypatch.setattr(engine, "stats", lambda: SimpleNamespace(num_running=0))
        found = await first_round(engine, *sizes)
        monkeypatch.setattr(engine, "stats", rounds[0])
        return found

    monkeypatch.setattr(kv_eviction, "_ANSWER", 12)
    monkeypatch.setattr(kv_eviction, "_round", late)
    found = asyncio.run(kv_eviction._measure("off", 2, 300))
    assert len(rounds) >= 2 and found.pages > 0
