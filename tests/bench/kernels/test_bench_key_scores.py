"""The measurements of dropped K/V, on small sizes."""

from __future__ import annotations

import asyncio

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
