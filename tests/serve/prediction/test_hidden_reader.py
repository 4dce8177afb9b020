"""Hidden states are read when they are due, and sketches keep what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serve import LLM, SamplingParams
from serve.config import QUEUE_POLICIES, EngineConfig
from serve.errors import ConfigError
from serve.prediction.features import SKETCH_SIZE
from serve.prediction.hidden_reader import HiddenReader
from serve.prediction.learned import LearnedPredictor
from serve.prediction.start import start_prediction
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.fakes import make_seq


@pytest.mark.parametrize("hidden_size", [32, 64, 100, 2048])
def test_sketches_keep_lengths_and_angles(hidden_size):
    reader = HiddenReader(hidden_size)
    one, other = torch.randn(2, hidden_size, generator=torch.Generator().manual_seed(1))
    rows = torch.stack([one, 3 * one, other])
    sketches = [found.sketch for found in reader.read(rows, [make_seq() for _ in range(3)])]
    assert all(sketch.shape == (SKETCH_SIZE,) for sketch in sketches)
    assert np.allclose(sketches[0], sketches[1], atol=1e-4), "the scale does not matter"
    assert not np.allclose(sketches[0], sketches[2], atol=0.5)
    assert np.linalg.norm(sketches[0]) == pytest.approx(SKETCH_SIZE**0.5, rel=0.5)
    again = HiddenReader(hidden_size).read(rows, [make_seq() for _ in range(3)])
    assert np.array_equal(again[0].sketch, sketches[0]), "a saved predictor needs the same signs"


def test_states_are_read_at_first_and_then_ever_less_often():
    reader, sequence = HiddenReader(64), make_seq(num_tokens=10_000)
    read_at = []
    for _ in range(2000):
        read_at += [s.num_output for s in reader.read(torch.ones(1, 64), [sequence])]
        sequence.token_ids.append(9)
        assert len(read_at) <= 1 or read_at[-1] - read_at[-2] >= 16
    assert read_at[:6] == [0, 16, 32, 48, 64, 80]
    assert len(read_at) < 24


def test_only_sequences_that_are_due_are_read():
    reader = HiddenReader(64)
    sequences = [make_seq() for _ in range(3)]
    sequences[1].state_due_at = 100
    rows = torch.randn(3, 64)
    found = reader.read(rows, sequences)
    assert [each.sequence for each in found] == [sequences[0], sequences[2]]
    assert reader.read(rows, sequences) == []
    sequences[0].state_due_at = sequences[2].state_due_at = 0
    assert np.allclose(reader.read(rows[2:], sequences[2:])[0].sketch, found[1].sketch)


def generated(**settings):
    prompts = [{"prompt_token_ids": [5 + i % 7, *range(6, 8 + 3 * i)]} for i in range(12)]
    params = [
        SamplingParams(max_tokens=5 + 7 * (i % 5), temperature=i % 2, seed=i) for i in range(12)
    ]
    with LLM(str(checkpoint("llama")), max_num_seqs=3, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        policy = llm._loaded.core._scheduler.policy
        return [output.outputs[0].token_ids for output in outputs], policy


def test_tokens_depend_on_no_order_and_no_predictor():
    expected, _ = generated(length_predictor="history")
    for order in QUEUE_POLICIES:
        tokens, policy = generated(order=order, length_predictor="learned")
        assert tokens == expected
        assert len(policy.lengths.stages[1].ratios.overall) == 12, "states were read"


def test_what_is_learned_is_kept(tmp_path):
    path = tmp_path / "lengths"
    _, first = generated(length_predictor_file=path)
    assert path.exists()
    _, second = generated(length_predictor_file=path)
    assert second.lengths.num_learned > first.lengths.num_learned


@pytest.mark.parametrize(
    ("settings", "is_learned"),
    [
        ({}, False),
        ({"order": "srpt"}, True),
        ({"order": "srpt", "length_predictor": "history"}, False),
        ({"order": "srpt", "memory_policy": "worst_case"}, False),
        ({"length_predictor": "learned"}, True),
        ({"length_predictor_file": "lengths"}, True),
    ],
)
def test_nothing_is_read_unless_it_is_used(settings, is_learned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prediction = start_prediction(EngineConfig(**settings), 64, "a model")
    assert (prediction.reader is not None) == is_learned
    assert isinstance(prediction.predictor, LearnedPredictor) == is_learned
    assert (prediction.file is not None) == ("length_predictor_file" in settings)
    if prediction.file is not None:
        prediction.file.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"length_predictor": "guess"},
        {"length_predictor": "history", "length_predictor_file": "x"},
        {"memory_policy": "worst_case", "length_predictor_file": "x"},
        {"length_predictor_file": ""},
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings):
    with pytest.raises(ConfigError, match="length_predictor"):
        EngineConfig(**settings)
