"""The measuring scripts run: each in its smoke mode, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.checkpoints import checkpoint


def run_script(module, tmp_path, *options):
    """The last line of the script's output, which is one JSON object."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, "--smoke", *options],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_engine_overhead(tmp_path):
    result = run_script("bench.engine_overhead", tmp_path, "--model", str(checkpoint("llama")))
    assert result["tokens"] == 256 * 20
    assert result["warm_rows_per_s"] > 1000
    assert result["paced_between_ms_p50"] > 0


@pytest.mark.slow
def test_http_overhead(tmp_path):
    (result,) = run_script("bench.http_overhead", tmp_path).values()
    assert result["ratio"] > 0


@pytest.mark.slow
def test_vs_transformers(tmp_path):
    result = run_script("bench.vs_transformers", tmp_path)
    assert set(result["seconds"]) == {
        "mergestep",
        "transformers, padded batch",
        "transformers, one by one",
    }
