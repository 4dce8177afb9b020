"""MTP layers and EAGLE-3 heads change no token, and draft what their references draft."""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from serve import LLM, Engine, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError, ModelLoadError
from serve.loading import model_source
from serve.models.packed_cache.cache import PackedCache
from serve.speculation import head_drafts
from serve.structured_output import StructuredOutput
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.decoders import edit_tensors
from tests.support.models.draft_heads import (
    EagleReference,
    MtpReference,
    draft_of,
    write_mtp,
)
from tests.support.preempted import until_preempted
from tests.support.profile import every_day
from tests.support.speculation.heads import PLAIN, SMALL, check, settings_of
from tests.support.speculation.mixed_requests import results
from tests.support.speculation.scripted import always_draft

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


HEADS = [
    ("mtp", "deepseek_v3", "yarn"),
    ("mtp", "glm4_moe", "groups"),
    ("eagle3", "qwen3", "base"),
    ("eagle3", "llama", "base"),
    ("mtp", "qwen3_5_text", "net"),
    ("mtp", "glm4_moe_lite", "three-heads"),
    ("eagle3", "gpt_oss", "yarn"),
    ("eagle3", "gemma2", "head-24"),
    ("eagle3", "mistral", "long"),
]
DTYPES = ["float32", "int8", "bfloat16", "int4"]


@pytest.mark.parametrize("dtype", every_day([0, 1], DTYPES))
@pytest.mark.parametrize(("kind", "family", "variant"), every_day([0, 1, 2, 4], HEADS))
def test_same_tokens(kind, family, variant, dtype, folder):
    settings = SMALL | settings_of(folder, kind, family, variant) | {"dtype": dtype}
    with LLM(**settings | PLAIN) as plain, LLM(**settings) as llm:
        assert check(llm, plain) > 100


class Noted:
    """Notes the drafts of an engine, which drafts for each sequence, and checks them."""

    def __init__(self, llm: LLM, reference: Any) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        self._reference = reference
        self.drafts = always_draft(llm)
        self._draft = self.drafts.draft
        self.drafts.draft = self._noted

    def _noted(self, sequences: Any, depths: Any) -> list[list[int]]:
        found = self._draft(sequences, depths)
        self.seen.extend(
            (list(s.token_ids), list(d)) for s, d in zip(sequences, found, strict=True) if d
        )
        return found

    def check(self, least: int, begin: int = 0) -> None:
        """Compares what was drafted since the last call with the reference's drafts. begin: the
        first position that the head has seen."""
        assert len(self.seen) >= least
        assert max(len(found) for _, found in self.seen) >= 3
        for tokens, found in self.seen:
            assert found == draft_of(self._reference, tokens, len(found), begin)
        self.seen.clear()


def reference_of(settings: dict[str, Any], kind: str, family: str, variant: str) -> Any:
    if kind == "mtp":
        return MtpReference(Path(settings["model"]), family, variant)
    return EagleReference(Path(settings["draft_model"]), Path(settings["model"]), (0, 1, 1))


PRECISE: dict[str, Any] = SMALL | {"dtype": "float32", "kv_dtype": "float32"}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(("kind", "family", "variant"), HEADS[:4])
def test_drafts_are_the_references(kind, family, variant, folder):
    """Each draft of greedy requests is what the head gives for the sequence's tokens: with whole
    prompts, prompts in chunks, and prefixes that are found."""
    settings = PRECISE | settings_of(folder, kind, family, variant) | {"kv_page_bytes": 8192}
    reference = reference_of(settings, kind, family, variant)
    prompts = [{"prompt_token_ids": [7 * i + j for j in range(5 + 40 * i)]} for i in range(3)]
    for rows in (600, 24):
        with LLM(**settings | {"max_num_batched_tokens": rows}) as llm:
            noted = Noted(llm, reference)
            # a prefix that takes longer to map than to compute is not used
            for _ in range(10):
                llm.generate(prompts, GREEDY, use_tqdm=False)
                noted.check(6)
                if llm.stats().prefix_hit_tokens > 50:
                    break
            assert llm.stats().prefix_hit_tokens > 50


def test_after_a_rest(folder, monkeypatch):
    """A head that has not drafted for a while has computed its rows, but for the last ones."""
    monkeypatch.setattr(head_drafts, "_IDLE_STEPS", 1000)
    head = ("mtp", "deepseek_v3", "yarn")
    settings = PRECISE | settings_of(folder, *head)
    with LLM(**settings) as llm:
        noted = Noted(llm, reference_of(settings, *head))
        most_drafted, num_rows = noted.drafts.most_drafted, 0

        def rests(sequence: Any) -> int:
            nonlocal num_rows
            num_rows = max(num_rows, noted.drafts._texts[sequence].num_pending)
            is_late = sequence.num_output_tokens > 100
            return most_drafted(sequence) if is_late else 0

        noted.drafts.most_drafted = rests
        params = SamplingParams(max_tokens=110, temperature=0.0, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        noted.check(1)
    assert 20 < num_rows <= 32


def test_after_a_pause(folder, monkeypatch):
    """A head that has paused begins again with the rows that follow, and sees no others."""
    monkeypatch.setattr(head_drafts, "_FIRST_PAUSE", 30)
    head = ("mtp", "deepseek_v3", "yarn")
    settings = PRECISE | settings_of(folder, *head)
    with LLM(**settings) as llm:
        noted = Noted(llm, reference_of(settings, *head))
        begins: set[int] = set()
        most_drafted = noted.drafts.most_drafted

        def rests(sequence: Any) -> int:
            text = noted.drafts._texts.get(sequence)
            begins.update([] if text is None else [text.begin])
            return most_drafted(sequence) if text is not None and text.begin else 0

        noted.drafts.most_drafted = rests
        params = SamplingParams(max_tokens=110, temperature=0.0, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        (begin,) = begins - {0}
        assert begin % 16 == 0
        assert 3 + 16 + 30 <= begin <= 3 + 16 + 30 + 17
        noted.check(5, begin)


def perfect_mtp(folder: Path) -> Path:
    """Writes a model whose next token depends on the last one only, with an MTP layer that knows
    it: all blocks add nothing, and the layer passes the embedding of the next token on."""
    path = write_mtp(folder, "deepseek_v3", "yarn", seed=9)
    size = json.loads((path / "config.json").read_text())["hidden_size"]

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            if "o_proj" in name or "down_proj" in name:
                tensor.zero_()
            elif "norm.weight" in name:
                tensor.fill_(1.0)
            elif "eh_proj" in name:
                tensor.copy_(torch.eye(size, 2 * size))
        return tensors

    edit_tensors(path, change)
    return path


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_right_drafts_are_kept(dtype, folder, tmp_path):
    settings = SMALL | {"model": str(perfect_mtp(tmp_path)), "dtype": dtype}
    prompts = [{"prompt_token_ids": [i, 5, 6]} for i in range(9, 17)]
    params = [
        SamplingParams(max_tokens=40, temperature=i % 2 * 0.7, seed=i, ignore_eos=True)
        for i in range(8)
    ]
    with LLM(**settings | PLAIN) as plain, LLM(**settings | {"speculation": "mtp"}) as llm:
        expected = results(plain.generate(prompts, params, use_tqdm=False))
        always_draft(llm)
        assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
        stats = llm.stats()
        assert stats.num_accepted_tokens > 0.7 * stats.num_draft_tokens > 150


def test_nothing_is_computed_in_the_range_before_a_preemption(folder):
    """A sequence that runs again may have a range whose pages are not mapped yet."""
    settings = SMALL | settings_of(folder, "mtp", "glm4_moe", "one-group")
    with LLM(**settings) as llm:
        drafts = always_draft(llm)
        follow, num_followed, is_preempted = drafts.follow, 0, False

        def after_preemption() -> float:
            nonlocal num_followed
            for sequence, text in drafts._texts.items():
                num_followed += text.num_pending >= 32
                sequence.num_preemptions += is_preempted
            return follow()

        drafts.follow = after_preemption
        computed = []
        compute = drafts._compute
        drafts._compute = lambda parts: computed.append(len(parts[0].next_ids)) or compute(parts)
        prompt = {"prompt_token_ids": list(range(5, 75))}
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        llm.generate(prompt, params, use_tqdm=False)
        assert num_followed == 1
        assert max(computed) >= 69
        computed.clear()
        is_preempted = True
        llm.generate({"prompt_token_ids": list(range(80, 150))}, params, use_tqdm=False)
        assert num_followed == 2
        assert max(computed, default=0) < 32


def test_preemption(folder):
    settings = SMALL | settings_of(folder, "mtp", "glm4_moe", "one-group")
    settings |= {"dtype": "int8", "kv_page_bytes": 4096, "memory_policy": "prompt_only"}
    prompts = [{"prompt_token_ids": [*range(5, 69), 100 + i]} for i in range(8)]
    params = [SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)] * 8
    with LLM(**settings | PLAIN) as plain:
        num_pages = plain._loaded.core.kv.pages_for(160)
        expected = results(plain.generate(prompts, params, use_tqdm=False))
    with LLM(**settings | {"kv_cache_bytes": (2 * num_pages + 4) * 4096}) as llm:
        drafts = always_draft(llm)
        found = until_preempted(llm, lambda: llm.generate(prompts, params, use_tqdm=False))
        assert results(found) == expected
        assert llm.stats().num_draft_tokens > 50
        assert llm.stats().pages_in_use == 0
        drafts._kv.check_integrity()


def test_grammars(folder):
    settings = SMALL | settings_of(folder, "eagle3", "qwen3", "base")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = StructuredOutput("json_schema", json.dumps(schema))
    params = [
        SamplingParams(max_tokens=60, temperature=0.8 * (i % 2), seed=i, structured=grammar)
        for i in range(4)
    ]
    prompts = [f"number {i}" for i in range(4)]
    with LLM(**settings | PLAIN) as plain, LLM(**settings) as llm:
        expected = results(plain.generate(prompts, params, use_tqdm=False))
        always_draft(llm)
        assert results(llm.generate(prompts, params, use_tqdm=False)) == expected


def test_packed_weights_are_kept_with_the_layer(folder, tmp_path, monkeypatch):
    """A start with the MTP layer and one without it have files of their own; the second start with
    it drafts as the first one did."""
    small = functools.partial(PackedCache, min_bytes=0)
    monkeypatch.setattr(model_source, "PackedCache", small)
    settings = SMALL | settings_of(folder, "mtp", "glm4_moe", "one-group")
    settings |= {"dtype": "int8", "packed_cache": str(tmp_path)}
    drafts: list[list[list[int]]] = []
    for number, speculation in enumerate(("mtp", "off", "mtp")):
        with LLM(**settings | {"speculation": speculation}) as llm:
            found: list[list[int]] = []
            if speculation == "mtp":
                head = always_draft(llm)
                head.draft = functools.partial(_note, found, head.draft)
                drafts.append(found)
            llm.generate({"prompt_token_ids": [9, 8, 7]}, GREEDY, use_tqdm=False)
            while len(list(tmp_path.glob("*.packed"))) < min(2, number + 1):
                time.sleep(0.01)
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) > 3
    assert len(list(tmp_path.glob("*.packed"))) == 2


def _note(found: list[list[int]], draft: Any, *args: Any) -> list[list[int]]:
    drafts: list[list[int]] = draft(*args)
    found.extend([list(each) for each in drafts])
    return drafts


def test_abort_drops_the_states(folder):
    settings = SMALL | settings_of(folder, "mtp", "glm4_moe", "groups")

    async def run() -> None:
        async with Engine(**settings) as engine:
            params = SamplingParams(max_tokens=140, ignore_eos=True)
            stream = engine.submit([5, 6, 7], params)
            async for _ in stream:
                break
            texts = engine._loaded.core._scheduler.drafting._by_model.model._texts
            assert texts
            stream.abort()
            while engine.stats().num_unfinished or engine.stats().num_running:
                await asyncio.sleep(0.01)
            assert not texts
            assert engine.stats().pages_in_use == 0

    asyncio.run(run())


def test_wrong_settings(folder):
    llama = str(checkpoint("llama"))
    with pytest.raises(ConfigError, match="speculation eagle3 needs draft_model"):
        EngineConfig(speculation="eagle3")
    with pytest.raises(ConfigError, match="draft_model needs speculation model or eagle3, not mtp"):
        LLM(llama, speculation="mtp", draft_model=llama)
    for setting in ({"tensor_parallel_size": 2}, {"memory_nodes": ["localhost:1"]}):
        with pytest.raises(ConfigError, match=f"speculation mtp needs .*{next(iter(setting))}"):
            EngineConfig(speculation="mtp", **setting)
    with pytest.raises(ModelLoadError, match="model_type 'llama' has no multi-token"):
        LLM(llama, speculation="mtp")
    with pytest.raises(ModelLoadError, match="num_nextn_predict_layers is 0"):
        LLM(str(checkpoint("glm4_moe_lite", "groups")), speculation="mtp")
    with pytest.raises(ModelLoadError, match=r"model.layers.3.input_layernorm.weight is missing"):
        LLM(str(checkpoint("deepseek_v3", "yarn")), speculation="mtp")
    with pytest.raises(ModelLoadError, match="architectures does not name an EAGLE-3 head"):
        LLM(llama, speculation="eagle3", draft_model=llama)
