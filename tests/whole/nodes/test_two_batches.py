"""A step that is split into two micro-batches gives the same tokens to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from memory.attention.seam import PlannedAttention
from serve.config import EngineConfig
from serve.loading.runtime import Runtime, load_runtime
from serve.request import Request
from serve.runner.runner import ModelRunner, StepResult
from serve.sampling_params import SamplingParams
from serve.scheduler.microbatches import MicrobatchPolicy
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence, make_sequences
from serve.scheduler.step_plan import SchedulerLimits, StepPlan
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.decoders import ListAttention, load
from tests.support.nodes.late_attention import LateAttention


class Scripted:
    """Splits steps in a given pattern and records the reported times."""

    def __init__(self, *pattern: bool) -> None:
        self.pattern = pattern
        self.calls: list[tuple[int, int]] = []
        self.reported: list[tuple[bool, float]] = []

    def splits(self, num_decodes: int, num_prompt_rows: int) -> bool:
        self.calls.append((num_decodes, num_prompt_rows))
        return self.pattern[len(self.calls) % len(self.pattern)]

    def learn(self, num_decodes: int, num_prompt_rows: int, is_split: bool, seconds: float) -> None:
        assert self.calls[-1] == (num_decodes, num_prompt_rows)
        self.reported.append((is_split, seconds))


def requests(vocab_size: int, count: int) -> list[Sequence]:
    rng = random.Random(2)
    made = []
    for number in range(count):
        params = SamplingParams(
            max_tokens=rng.randint(3, 25),
            temperature=rng.choice([0.0, 0.9]),
            seed=number,
            ignore_eos=True,
            logprobs=1,
        )
        prompt = tuple(rng.randrange(2, vocab_size) for _ in range(rng.choice([1, 5, 40, 90])))
        made += make_sequences(Request(str(number), None, prompt, params, 0.0), frozenset())
    return made


@contextmanager
def loaded(model: str | Path, **settings: object) -> Iterator[Runtime]:
    runtime = load_runtime(
        EngineConfig(
            model=str(model), max_num_seqs=12, kv_cache_bytes=1 << 24, max_model_len=140, **settings
        )  # type: ignore[arg-type]
    )
    memory = runtime.memory
    yield runtime
    del runtime
    memory.close()


def generate(
    runtime: Runtime, attention: PlannedAttention, microbatches: MicrobatchPolicy | None
) -> list[tuple[list[int], list[object]]]:
    """Returns the tokens and log-probabilities of each request; two requests arrive per step."""
    clock = iter(range(10**6))
    runner = ModelRunner(
        runtime.model,
        runtime.kv,
        attention,
        microbatches=microbatches,
        clock=lambda: float(next(clock)),
    )
    scheduler = Scheduler(SchedulerLimits(8, 64, 30), runtime.kv)
    waiting = requests(runtime.spec.vocab_size, 14)
    sequences, logprobs = list(waiting), {id(s): [] for s in waiting}
    while waiting or scheduler.has_work():
        for sequence in waiting[:2]:
            scheduler.add(sequence)
        del waiting[:2]
        plan = scheduler.schedule(0.0)
        assert plan is not None
        result: StepResult = runner.run(plan, lambda: None)
        expected = [s for s, samples in zip(plan.sequences, plan.samples, strict=True) if samples]
        assert result.sampled == expected
        for sequence, entry in zip(result.sampled, result.logprobs or [], strict=True):
            logprobs[id(sequence)].append(entry)
        scheduler.update(plan, result.tokens)
    runtime.kv.close_all()
    return [(sequence.token_ids, logprobs[id(sequence)]) for sequence in sequences]


CASES = [
    ("default", {}),
    (("llama", "base"), {"dtype": "float32"}),
    (("llama", "base"), {"dtype": "bfloat16"}),
    (("qwen2", "window"), {"dtype": "float32"}),
    (("gpt2", "base"), {"dtype": "float32"}),
    (("qwen3", "base"), {"dtype": "int8"}),
]


@pytest.mark.parametrize(("model", "settings"), CASES, ids=str)
def test_microbatches_give_the_same_bits(model, settings) -> None:
    with loaded(model if model == "default" else checkpoint(*model), **settings) as runtime:
        expected = generate(runtime, runtime.attention, None)
        late = LateAttention(runtime.attention)
        assert generate(runtime, late, Scripted(False)) == expected
        num_steps = len(late.steps)
        for pattern in ((True,), (True, True, False)):
            late, microbatches = LateAttention(runtime.attention), Scripted(*pattern)
            assert generate(runtime, late, microbatches) == expected
            num_split = sum(is_split for is_split, _ in microbatches.reported)
            assert len(late.steps) == num_steps + num_split and num_split > 15
        # a step of one sequence does not ask the policy, and times come from the clock
        assert all(decodes + rows > 1 for decodes, rows in microbatches.calls)
        assert {seconds for _, seconds in microbatches.reported} == {1.0}


@contextmanager
def one_step(late: LateAttention, runtime: Runtime) -> Iterator[tuple[ModelRunner, StepPlan]]:
    scheduler = Scheduler(SchedulerLimits(8, 64, 30), runtime.kv)
    for sequence in requests(320, 4):
        scheduler.add(sequence)
    plan = scheduler.schedule(0.0)
    assert plan is not None and len(plan.sequences) >= 2
    yield ModelRunner(runtime.model, runtime.kv, late, microbatches=Scripted(True)), plan
    runtime.kv.close_all()


def test_one_microbatch_computes_while_the_other_waits() -> None:
    """Each micro-batch begins its next layer between the other's begin and wait."""
    with loaded(checkpoint("llama"), dtype="float32") as runtime:
        late = LateAttention(runtime.attention)
        with one_step(late, runtime) as (runner, plan):
            runner.run(plan, lambda: None)
        assert late.events == [
            *[("begin", 0, 0), ("begin", 1, 0)],
            *[("wait", 0, 0), ("begin", 0, 1), ("wait", 1, 0), ("begin", 1, 1)],
            *[("wait", 0, 1), ("wait", 1, 1)],
        ]
        starts = [set(step.starts) for step in late.steps]
        assert not starts[0] & starts[1]
        assert len(starts[0]) + len(starts[1]) == len(plan.sequences)


def test_a_failing_microbatch_fails_only_its_step() -> None:
    with loaded(checkpoint("llama"), dtype="float32") as runtime:
        late = LateAttention(runtime.attention, fails_at=(1, 1))
        with one_step(late, runtime) as (runner, plan):
            with pytest.raises(ConnectionError):
                runner.run(plan, lambda: None)
            again = runner.run(plan, lambda: None)
            alone = ModelRunner(runtime.model, runtime.kv, runtime.attention)
            assert again == alone.run(plan, lambda: None) and again.tokens


def test_local_attention_is_never_split() -> None:
    with loaded(checkpoint("qwen2", "window"), dtype="float32") as runtime:
        assert not runtime.attention.is_remote
        assert ModelRunner(runtime.model, runtime.kv, runtime.attention)._microbatches is None
        late = LateAttention(runtime.attention)
        assert ModelRunner(runtime.model, runtime.kv, late)._microbatches is not None


@torch.inference_mode()
def test_slices_stop_once_in_each_layer() -> None:
    decoder = load(checkpoint("gpt2"))
    attention = ListAttention(decoder.attention_layers())
    slices = decoder.slices(torch.tensor([1, 2]), torch.tensor([0, 1]), attention)
    for layer in range(decoder.spec.num_layers):
        next(slices)
        assert attention.calls[-1] == ("finish", layer)
    with pytest.raises(StopIteration) as end:
        next(slices)
    fresh = ListAttention(decoder.attention_layers())
    whole = decoder.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), fresh)
    assert torch.equal(end.value.value, whole)
