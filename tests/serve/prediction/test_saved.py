"""What was learned survives a restart, and a damaged or foreign file is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load, save

from serve.errors import ConfigError
from serve.prediction.learned import LearnedPredictor
from serve.prediction.saved import PredictorFile, restore
from tests.serve.prediction.test_learned import World, sequence_of, sketch_of

MODEL = "2 layers of 64, 100 tokens"


@pytest.fixture
def kept(tmp_path):
    """A file, and the predictor that it was saved from."""
    predictor = LearnedPredictor()
    file = PredictorFile(tmp_path / "lengths", predictor, MODEL)
    world = World(predictor)
    for _ in range(200):
        world.serve("client-a", by_token=True, by_state=True)
    file.close()
    file.close()
    return tmp_path / "lengths", predictor


def medians(predictor):
    rng = np.random.default_rng(3)
    found = []
    for last in (11, 12):
        sequence = sequence_of((5, 6, last), "a new client")
        predictor.arrived(sequence)
        found.append(predictor.quantile(sequence, 0.5))
        predictor.saw_state(sequence, 0, sketch_of(1.0, rng))
        found.append(predictor.quantile(sequence, 0.9))
    return found


def test_a_restart_predicts_as_before(kept):
    path, predictor = kept
    again = LearnedPredictor()
    PredictorFile(path, again, MODEL).close()
    assert again.num_learned == predictor.num_learned > 0
    new, old = medians(again), medians(predictor)
    # histories by size of the prediction are not kept, so the spread differs a little
    assert new == pytest.approx(old, rel=0.35)
    assert new != pytest.approx(medians(LearnedPredictor()), rel=0.35)


def test_no_client_and_no_prompt_is_written(kept):
    path, _ = kept
    assert b"client-a" not in path.read_bytes()
    assert path.stat().st_size < 1 << 20
    assert [each.name for each in path.parent.iterdir()] == ["lengths"]


def test_another_model_is_refused(kept):
    with pytest.raises(ConfigError, match=r"lengths.*another model"):
        PredictorFile(kept[0], LearnedPredictor(), "3 layers of 64, 100 tokens")


def changed(path, **arrays):
    path.write_bytes(save(load(path.read_bytes()) | arrays))


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"computed.sums": np.full((70, 69), np.nan)}, "sums"),
        ({"computed.sums": np.full((70, 69), 1e300)}, "too large"),
        ({"computed.sums": -np.eye(70, 69)[:, :] * 100}, "sums"),
        ({"computed.sums": np.zeros((3, 3))}, "shape"),
        ({"arrived.sums": np.full((2, 4096), 9.0)}, "bounds"),
        ({"arrived.ratios": np.full(5, -1)}, "lengths"),
        ({"arrived.ratios": np.zeros(5000, np.int64)}, "lengths"),
        ({"past_lengths": np.zeros(3, np.int32)}, "type"),
        ({"grown.errors": np.array([1.0, np.nan, 0.0])}, "errors"),
        ({"grown.num_learned": np.array([-1])}, "numbers"),
        ({"more": np.zeros(1)}, "arrays"),
        ({"format": np.zeros(4, np.uint8)}, "not a file"),
    ],
)
def test_damage_is_refused(kept, arrays, reason):
    changed(kept[0], **arrays)
    with pytest.raises(ConfigError, match=f"length_predictor_file .*lengths: .*{reason}"):
        restore(kept[0], LearnedPredictor(), MODEL)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"{}", bytes(5 << 20)])
def test_any_other_file_is_refused(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="length_predictor_file"):
        PredictorFile(path, LearnedPredictor(), MODEL)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a directory"):
        PredictorFile(tmp_path / "no" / "lengths", LearnedPredictor(), MODEL)


def test_a_full_disk_is_only_logged(tmp_path, caplog, monkeypatch):
    predictor = LearnedPredictor()
    file = PredictorFile(tmp_path / "lengths", predictor, MODEL)
    world = World(predictor)
    for _ in range(40):
        world.serve()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    file.close()
    assert "No space left" in caplog.text
