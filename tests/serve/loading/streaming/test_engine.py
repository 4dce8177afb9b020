"""An engine whose weights stream: answers, errors, numbers, and when it streams by itself."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from ops.cpu import native_library
from serve.config import EngineConfig
from serve.engine.llm import LLM
from serve.engine.node_recovery import generation_error
from serve.errors import WEIGHTS_LOST, ConfigError, WeightsLostError
from serve.http.edge.errors import to_api_error
from serve.loading import footprint, model_source
from serve.loading.runtime import load_runtime
from serve.loading.streaming.placement import least_bytes
from serve.sampling_params import SamplingParams
from serve.single_file.config import with_directory
from tests.support.gguf.cases import find_case, original
from tests.support.gguf.quantized import packed
from tests.support.gguf.writer import write_gguf
from tests.support.models.packed_models import copy_of_model
from tests.support.models.streamed import make_small, noted_needs, use_faulty

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="needs the native kernels"
)
PROMPTS = [[5, 6, 7, 8], [9, 8, 7], [11] * 9]
SETTINGS: dict[str, Any] = {
    "dtype": "int8",
    "kv_cache_bytes": 16 << 20,
    "max_model_len": 64,
    "seed": 0,
}


@pytest.fixture(params=[("llama", "base"), ("qwen3_moe", "head-24")], ids=["layers", "experts"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_small(monkeypatch)
    return copy_of_model(*request.param, tmp_path)


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params)]


def smallest(model: Path) -> int:
    """Returns the least budget with which the model is served."""
    with noted_needs() as found, pytest.raises(ConfigError, match="is too little"):
        load_runtime(EngineConfig(str(model), weight_memory_bytes=1, **SETTINGS))
    return least_bytes(found[-1])


def test_answers_are_those_of_an_engine_in_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LLM(model, **SETTINGS)
    want = answers(whole)
    assert whole._loaded.weight_stream is None
    whole.shutdown()
    llm = LLM(model, weight_memory_bytes=smallest(model), **SETTINGS)
    stream = llm._loaded.weight_stream
    assert stream is not None
    for _ in range(2):
        assert answers(llm) == want
    stats = stream.stats()
    assert stats.read_bytes > 0 and stats.stalled_s >= 0 and stats.resident_bytes > 0
    llm.shutdown()
    assert stream.stats().resident_bytes == 0


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_too_little_memory_is_refused_before_anything_is_packed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_small(monkeypatch)
    if kind == "safetensors":
        path = copy_of_model("llama", "base", tmp_path)
    else:
        source = original(find_case("llama-llama3"))
        weights = packed(source, lambda _: "Q4_0")
        file = write_gguf(source, tmp_path / "model.gguf", "llama", weights)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        path = Path(with_directory(EngineConfig(str(file))).model)
    need = smallest(path)
    for file in tmp_path.rglob("*.packed"):
        file.unlink()
    caplog.clear()
    with pytest.raises(ConfigError, match="is too little: this model needs at least") as raised:
        load_runtime(EngineConfig(str(path), weight_memory_bytes=1, **SETTINGS))
    assert "packed weights: writing" not in caplog.text and not list(tmp_path.rglob("*.packed"))
    config = EngineConfig(str(path), **SETTINGS)
    source = model_source.read_source(config)
    _, budget = footprint.streamed_bytes(config, source.spec, source.precision)
    assert 0.3 * need < budget <= need, raised.value


def test_a_disk_that_fails_ends_the_requests_and_not_the_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, files = smallest(model), use_faulty(monkeypatch)
    llm = LLM(model, weight_memory_bytes=budget, **SETTINGS)
    want = answers(llm)
    files[-1].fault = lambda _: errno.EIO
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for one, right in zip(llm.generate(PROMPTS, params), want, strict=True):
        found = one.outputs[0]
        assert found.finish_reason == "error" and list(found.token_ids) != right
        assert list(found.token_ids) == right[: len(found.token_ids)]
    files[-1].fault = lambda _: None
    assert answers(llm) == want
    llm.shutdown()


def test_it_streams_by_itself_where_the_weights_do_not_fit(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    need = smallest(model)
    monkeypatch.setattr(footprint, "available_memory", lambda: int(need / 0.75) + 8)
    monkeypatch.setattr(footprint, "check_weights_fit", _never_fit)
    runtime = load_runtime(EngineConfig(str(model), **SETTINGS | {"kv_cache_bytes": None}))
    assert runtime.weight_stream is not None
    assert runtime.weight_stream.num_bytes <= need + 8
    assert "do not fit into memory" in caplog.text and "are too large" in caplog.text
    assert "tokens a second" in caplog.text
    runtime.memory.close()
    monkeypatch.setattr(footprint, "available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="the weights are too large"):
        load_runtime(EngineConfig(str(model), **SETTINGS))


def test_the_default_bound_of_packed_files_does_not_stop_a_larger_model(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "DEFAULT_BYTES", 1000)
    bounded = EngineConfig(
        str(model), weight_memory_bytes=1 << 30, packed_cache_bytes=1000, **SETTINGS
    )
    with pytest.raises(ConfigError, match="are more than packed_cache_bytes"):
        load_runtime(bounded)
    load_runtime(EngineConfig(str(model), weight_memory_bytes=1 << 30, **SETTINGS)).memory.close()


def _never_fit(*_: object, **__: object) -> None:
    raise ConfigError("the weights are too large")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"load_format": "random"}, "load_format random"),
        ({"packed_cache": "off"}, "packed_cache off"),
        ({"memory_nodes": ("tcp://a:1",)}, "memory_nodes"),
        ({"weights_from": ("tcp://a:1",), "weights_key_file": "key"}, "weights_from"),
        ({"backend": "reference"}, "only the native kernels"),
    ],
)
def test_what_excludes_it_is_named(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = copy_of_model("llama", "base", tmp_path)
    config = EngineConfig(str(path), weight_memory_bytes=1 << 20, **settings)
    with pytest.raises(ConfigError, match=rf"weight_memory_bytes: .*{named}"):
        load_runtime(config)


def test_the_error_says_what_to_do() -> None:
    error = generation_error(WEIGHTS_LOST)
    assert isinstance(error, WeightsLostError)
    answer = to_api_error(error, "req_1")
    assert (answer.status, answer.code) == (503, "weights_lost")


@pytest.mark.parametrize("value", [0, -1, 1.5, "1GiB", True])
def test_a_budget_is_a_number_of_bytes(value: Any) -> None:
    with pytest.raises(ConfigError, match="weight_memory_bytes must be a positive integer"):
        EngineConfig(weight_memory_bytes=value)
