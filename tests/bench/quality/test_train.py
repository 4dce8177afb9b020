"""The training learns, goes on where it stopped, and writes what the engine loads."""

from __future__ import annotations

import pytest
import torch

from bench.cli.kv_policies import BUILT
from bench.quality import train
from bench.quality.measure import by_engine, by_reference, rows_of
from bench.quality.network import Network, Shape
from bench.quality.tasks import Exercise, make_exercises
from serve.config import EngineSettings

SHORT = (train.Stage((32, 64), 512, 1.0, 3e-3),)


def quiet(line: str) -> None:
    pass


@pytest.fixture
def short(monkeypatch):
    """Replaces the curriculum by one that runs in moments."""
    monkeypatch.setattr(train, "STAGES", SHORT)


def steps(trainer, count):
    for _ in range(count):
        trainer._step()
    return {name: w.clone() for name, w in trainer.network.state_dict().items()}


@pytest.mark.usefixtures("short")
def test_a_stopped_run_goes_on(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = steps(train.Trainer(tmp_path / "a", 1.0, 0), 6)
    first = train.Trainer(tmp_path / "b", 1.0, 0)
    steps(first, 3)
    first.save()
    second = train.Trainer(tmp_path / "b", 1.0, 1)
    assert second.step == 3
    assert all(bool((w == whole[name]).all()) for name, w in steps(second, 3).items())


@pytest.mark.exhaustive
@pytest.mark.usefixtures("short")
def test_the_loss_falls(tmp_path):
    trainer = train.Trainer(tmp_path, 1.0, 0)
    trainer._step()
    before = dict(trainer.recent)
    steps(trainer, 60)
    assert trainer.recent["form"] < 0.6 * before["form"]
    assert trainer.recent["answer"] < 0.95 * before["answer"]


def test_the_first_heads_look_at_the_tokens_before():
    torch.manual_seed(1)
    network = Network(Shape())
    train.initialize(network)
    layer = network.model.layers[0]
    x = network.model.embed_tokens(torch.randint(6, 500, (1, 80)))
    cos, sin = train.angles(network.shape, torch.arange(80))
    q, k, _ = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
    scores = (q[0, :2] @ k[0, 0].T) * network.shape.head_dim**-0.5
    for head, back in ((0, 1), (1, 2)):
        assert int(scores[head, 60, :61].argmax()) == 60 - back


def test_the_engine_and_the_reference_agree(tmp_path):
    torch.manual_seed(2)
    network = Network(Shape(num_hidden_layers=2))
    train.initialize(network)
    train.write_checkpoint(network, tmp_path)
    prompt = [0, *torch.randint(6, 500, (200,)).tolist()]
    exercise = Exercise("text", prompt, torch.randint(2, 500, (12,)).tolist(), [])
    (ours,) = by_reference(tmp_path, ["full"], [exercise], quiet)["full"]
    (engines,) = by_engine(tmp_path, ["full"], [exercise], quiet, dtype="float32")["full"]
    assert engines.logprobs == pytest.approx(ours.logprobs, abs=2e-3)
    assert engines.right == ours.right


@pytest.mark.parametrize(
    "policy",
    [
        "h2o:budget=50,least=1",
        "pyramid:budget=20%",
        *[
            pytest.param(costly, marks=pytest.mark.exhaustive)
            for costly in (
                "window:budget=20%",
                "snapkv:budget=20%",
                "keyformer:budget=20%",
                "h2o:budget=100%",
            )
        ],
    ],
)
def test_the_engine_drops_what_the_reference_drops(policy):
    """On the model that has learned to look at what matters, so that other K/V gives others."""
    exercises = [one for one in make_exercises(600, 1, 4) if one.task in ("hops", "later", "text")]
    (ours,) = by_reference(BUILT, [policy], exercises, quiet).values()
    settings: EngineSettings = {"dtype": "float32", "kv_dtype": "float32"}
    (engines,) = by_engine(BUILT, [policy], exercises, quiet, **settings).values()
    for one, other in zip(ours, engines, strict=True):
        # equal scores but for rounding may drop another token than the reference
        assert other.logprobs == pytest.approx(one.logprobs, abs=0.02)
        assert other.right == one.right
        if not policy.startswith("pyramid"):  # whose layers differ; the engine counts the longest
            assert other.held == pytest.approx(one.held, abs=0.01)


def test_the_engine_selects_about_what_the_reference_selects():
    exercises = [one for one in make_exercises(1024, 2, 4) if one.task in ("needles", "hops")]
    policy = "quest:budget=25%"
    (ours,) = by_reference(BUILT, [policy], exercises, quiet).values()
    engines = by_engine(BUILT, [policy, "quest:budget=100%"], exercises, quiet, kv_dtype="int8")
    bounds = 48 / 592  # of a token's bytes, in 4 layers with 2 heads of 32
    for whole in engines["quest:budget=100%"]:
        assert whole.read == pytest.approx(1.0 - bounds), "it needs no bounds"
    for one, other in zip(ours, engines[policy], strict=True):
        assert other.right == one.right
        assert other.held == 1.0
        selected = (other.read - bounds) / (1.0 - bounds)
        assert selected == pytest.approx(one.read, abs=0.02)


@pytest.mark.exhaustive
def test_the_committed_model_can_do_the_tasks():
    exercises = make_exercises(1024, 2, 8)
    (row,) = rows_of(exercises, by_reference(BUILT, ["full"], exercises, quiet))
    assert min(row.accuracy.values()) >= 0.9 and row.perplexity < 10
