"""Plans of models whose layers have states: their bytes, their times, and how many sequences run at
once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.plan.capacity import max_sequences, sequence_bytes
from bench.plan.cost import Machine, MachineCost
from bench.plan.efficiency import BOUND
from bench.plan.hardware import Device
from bench.plan.run import run
from bench.plan.serving import decode_work
from bench.plan.shapes import Precision, load_shape
from ops.cpu import native_library
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.engine.step_executor import StepExecutor
from serve.errors import ConfigError
from serve.loading import footprint as module
from serve.loading.footprint import footprint, weight_bytes
from serve.loading.precision import resolve_precision
from serve.models import read_spec
from tests.support.engine.checkpoints import checkpoint

KINDS = ["lfm2", "qwen3_5_text"]
PLAIN = Precision("float32", "float32")
PROMPT, OUTPUT = 160, 40
ROOM = 3 << 20
# 1 TB/s, and arithmetic that never binds
READER = Device(
    name="reader",
    kind="cpu",
    memory_bytes=100e9,
    bytes_per_s=1e12,
    operations={"bf16": 1e20, "int8": 1e20, "fp32": 1e20},
    cache_bytes=0.0,
)


@pytest.mark.parametrize(
    ("name", "parameters", "state_bytes", "kv_bytes"),
    [
        # 10 convolutions of width 3
        ("lfm2-1.2b", 1.17e9, 10 * 4 * 2 * 2048, 6 * 2 * 2 * 8 * 64),
        # delta nets of 16 or 32 heads of 128 x 128, and convolutions of width 4 over q, k and v
        ("qwen3.5-0.8b", 0.75e9, 18 * 4 * (16 * 128**2 + 3 * 48 * 128), 6 * 2 * 2 * 2 * 256),
        ("qwen3.5-4b", 4.2e9, 24 * 4 * (32 * 128**2 + 3 * 64 * 128), 8 * 2 * 2 * 4 * 256),
        ("qwen3.5-9b", 8.95e9, 24 * 4 * (32 * 128**2 + 3 * 64 * 128), 8 * 2 * 2 * 4 * 256),
    ],
)
def test_published_models(name: str, parameters: float, state_bytes: int, kv_bytes: int) -> None:
    shape = load_shape(name)
    assert shape.num_parameters == pytest.approx(parameters, rel=0.01)
    assert (shape.state_bytes, shape.kv_token_bytes(Precision())) == (state_bytes, kv_bytes)
    assert sequence_bytes(shape, Precision(), 1000) == state_bytes + 1000 * kv_bytes


@pytest.mark.parametrize("batch", [1, 30])
def test_a_decode_row_reads_and_writes_its_state(batch: int) -> None:
    shape = load_shape("qwen3.5-4b")
    without = replace(shape, state_bytes=0)
    with_s, without_s = (
        MachineCost(each, PLAIN, Machine(READER), BOUND).seconds(decode_work(batch, 100))
        for each in (shape, without)
    )
    assert with_s - without_s == pytest.approx(batch * 2 * shape.state_bytes / 1e12)


def test_the_state_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result = run("qwen3.5-4b", machines=["l4"], batches=[1], contexts=[512])
    assert result["details"]["state_bytes"] == load_shape("qwen3.5-4b").state_bytes
    assert "a state of 52.7 MB a sequence" in " ".join(capsys.readouterr().out.split())
    run("qwen3-8b", machines=["l4"], batches=[1], contexts=[512])
    assert "a state" not in capsys.readouterr().out


def test_machines_that_cannot_serve_states_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"2xl4.*states, which several devices cannot"):
        run("qwen3.5-4b", machines=["2xl4"])
    with pytest.raises(ConfigError, match="compute and memory devices cannot"):
        run("qwen3.5-4b", disaggregated=True)


@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
@pytest.mark.small_pages
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_sequences_run_at_once_as_the_plan_says(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, running, run_step = str(checkpoint(kind, "long")), [0], StepExecutor.run

    def noting(executor: StepExecutor, *args: object) -> None:
        running.append(len(executor._scheduler.running))
        run_step(executor, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(StepExecutor, "run", noting)
    prompts = [[(7 * i + j * j + 3 * i * j) % 90 + 3 for j in range(PROMPT)] for i in range(32)]
    settings = {"kv_page_bytes": 4096, "kv_cache_bytes": ROOM, "max_num_seqs": 32}
    with LLM(path, dtype="float32", max_num_batched_tokens=512, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        assert llm.stats().num_preemptions <= 2
    shape = load_shape(path)
    memory = ROOM + shape.weight_bytes(PLAIN)
    device = replace(READER, memory_bytes=memory / BOUND.memory)
    cost = MachineCost(shape, PLAIN, Machine(device), BOUND)
    predicted = max_sequences(cost, PROMPT + OUTPUT)
    assert predicted > 10
    assert max(running) == pytest.approx(predicted, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_footprint_counts_a_state_for_each_sequence(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(checkpoint(kind, "long"))
    # without room for drafted rows, which the plan does not count
    config = EngineConfig(path, dtype="float32", max_model_len=200, speculation="off")
    spec = read_spec(config.model_path)
    precision = resolve_precision(config, spec)
    weights = weight_bytes(config, spec, precision)
    free = 20 << 20
    monkeypatch.setattr(module, "available_memory", lambda: weights.total + free)
    takes, shape = footprint(config, spec, precision, weights), load_shape(config.model_path)
    assert takes.kv_token_bytes == shape.kv_token_bytes(PLAIN)
    assert shape.state_bytes <= takes.state_bytes < shape.state_bytes + 4 * 512
    most = 0.4 * free / sequence_bytes(shape, PLAIN, 200)
    # pages and records are rounded up, to 16 KiB here
    assert 0.75 * most < takes.max_sequences <= most
