"""Slow masks: a step does not wait for them, and their sequences are in a later step."""

from __future__ import annotations

import threading
import time

import pytest

from serve.config import default_model_path
from serve.request import FinishReason
from serve.runner.mask_filler import MaskFiller
from serve.scheduler.step_plan import StepPlan
from serve.structured import mask_budget
from serve.structured.compiler import GrammarCompiler
from serve.structured.mask_budget import MaskBudget
from serve.structured.token_mask import TOO_COMPLEX, Matcher, SequenceMask
from serve.structured_output import StructuredOutput
from serve.text.tokenizer import Tokenizer
from tests.support.engine.fakes import make_seq

WAIT_S = 10.0


class SlowMask:
    """A mask whose filling takes until the test lets it end."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.cost_s = cost_s
        self.job: object = None
        self.may_end = threading.Event()
        self.num_fills = 0
        self.has_started = threading.Event()

    def is_needed(self, num_tokens: int) -> bool:
        return True

    def fill(self, token_ids: list[int]) -> None:
        self.num_fills += 1
        self.has_started.set()
        assert self.may_end.wait(WAIT_S)


@pytest.fixture
def filler():
    made = MaskFiller()
    made._num_threads = 1
    yield made
    made.close()


def sequences(*masks):
    batch = []
    for mask in masks:
        sequence = make_seq()
        sequence.mask = mask
        batch.append(sequence)
    return batch


def plan_of_decodes(batch):
    return StepPlan(batch, [1] * len(batch), len(batch), [True] * len(batch), len(batch))


def fast_mask(cost_s=0.0):
    mask = SlowMask(cost_s)
    mask.may_end.set()
    return mask


def test_a_sequence_with_a_late_mask_is_in_a_later_step(filler):
    slow, behind = SlowMask(), fast_mask(cost_s=1.0)
    batch = sequences(slow, behind, None)
    plan = plan_of_decodes(batch)
    masks = filler.begin(plan)
    late = masks.wait()
    assert late == {batch[0], batch[1]} and masks.wait() is late
    assert filler.begin(plan).wait() == late  # it is still being filled
    slow.may_end.set()
    deadline = time.monotonic() + WAIT_S
    while filler.begin(plan).wait() and time.monotonic() < deadline:
        pass
    assert time.monotonic() < deadline
    assert slow.num_fills == 1, "the late mask is used"
    filler.begin(plan).wait()
    assert slow.num_fills == 2, "the next step needs a new mask"


def test_a_step_of_slow_masks_waits_for_one(filler):
    slow = SlowMask()
    batch = sequences(slow, fast_mask(cost_s=1.0))
    timer = threading.Timer(0.1, slow.may_end.set)
    timer.start()
    assert batch[0] not in filler.begin(plan_of_decodes(batch)).wait()
    timer.join()


def test_cheap_masks_come_first_but_no_mask_starves(filler):
    filled = []

    class Recording(SlowMask):
        def fill(self, token_ids):
            filled.append(self.cost_s)

    blocker = SlowMask()
    batch = sequences(blocker, Recording(3.0), Recording(1.0), Recording(2.0), None)
    late = filler.begin(plan_of_decodes(batch)).wait()
    assert len(late) == 4
    batch[1].mask.job.num_late = 5  # 3 / 6 is before 1 / 2
    masks = filler.begin(plan_of_decodes(batch))
    blocker.may_end.set()
    while masks.wait():
        masks = filler.begin(plan_of_decodes(batch))
    assert filled[:3] == [3.0, 1.0, 2.0]


def test_a_plan_without_the_late_sequences():
    one, late, prompt, late_prompt = sequences(None, None, None, None)
    plan = StepPlan([one, late, prompt, late_prompt], [1, 1, 5, 7], 2, [True] * 4, 14)
    part = plan.without_late({late, late_prompt})
    assert part.sequences == [one, prompt, late_prompt]
    assert (part.num_rows, part.num_decodes, part.num_total_rows) == ([1, 5, 6], 1, 12)
    assert part.samples == [True, True, False]
    assert plan.num_rows == [1, 1, 5, 7], "the runner's plan is unchanged"


def test_a_budget_is_spent_and_recovers(monkeypatch):
    budget = MaskBudget(1000)
    for _ in range(10_000):
        budget.add_mask(1e-4)
        budget.add_token(5e-5)
    assert budget.may_consume and not budget.is_spent, "usual masks never spend the budget"
    for _ in range(200):
        budget.add_mask(0.01)
    assert budget.is_spent
    budget.add_token(0.1)
    assert not budget.may_consume
    for _ in range(2000):
        budget.add_token(0.0)
    assert budget.may_consume
    large = MaskBudget(200_000)
    for _ in range(1000):
        large.add_mask(0.004)
    assert not large.is_spent, "a mask of a large vocabulary may take longer"


@pytest.fixture(scope="module")
def compiler():
    tokenizer = Tokenizer.load(default_model_path())
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size, {tokenizer.eos_token_id})
    yield made
    made.close()


def masks_of(compiler, source, count, budget=None):
    matcher = Matcher(compiler.compile(StructuredOutput("regex", source)))
    ends = frozenset(compiler._ends)
    size = compiler._vocab_size
    return [
        SequenceMask(
            size,
            num_prompt=1,
            matcher=matcher.copy(),
            eos_ids=ends,
            stop_ids=ends,
            budget=budget,
        )
        for _ in range(count)
    ]


def test_a_request_ends_when_its_mask_budget_is_spent(compiler):
    budget = MaskBudget(compiler._vocab_size)
    mask, other = masks_of(compiler, "[a-z]+", 2, budget)
    mask.fill([1])
    assert mask.error is None
    budget.add_mask(100.0)
    other.fill([1])
    assert (other.error, other.ending([1, 2])) == (TOO_COMPLEX, FinishReason.ERROR)


def test_the_first_mask_of_a_grammar_is_computed_once(compiler):
    class Counting:
        num_masks = 0

        def __init__(self, inner):
            self._inner = inner

        def deep_copy(self):
            return Counting(self._inner.deep_copy())

        def unsafe_compute_mask_ptr(self, *args):
            Counting.num_masks += 1
            return self._inner.unsafe_compute_mask_ptr(*args)

        def __getattr__(self, name):
            return getattr(self._inner, name)

    plain = masks_of(compiler, "(yes|no)", 1)[0]
    plain.fill([1])
    matcher = Matcher(Counting(compiler.compile(StructuredOutput("regex", "(yes|no)"))))
    size = compiler._vocab_size
    for _ in range(5):
        mask = SequenceMask(size, num_prompt=1, matcher=matcher.copy())
        mask.fill([1])
        assert mask.bits.tolist() == plain.bits.tolist()
    assert Counting.num_masks == 1


def test_tokens_that_are_consumed_late_end_a_text_with_eos(compiler, monkeypatch):
    """A token that is slow to consume is consumed with the next mask, not between two steps."""
    monkeypatch.setattr(mask_budget, "_USUAL_TOKEN_S", -1.0)  # the budget never recovers
    (mask,) = masks_of(compiler, "[xyz]", 1)
    mask.fill([1])
    letter = next(i for i in range(2, 4096) if mask.bits[i >> 5] >> (i & 31) & 1)
    assert mask.ending([1, letter]) is FinishReason.STOP
    (mask,) = masks_of(compiler, "[xyz]", 1)
    mask._budget.add_token(1.0)
    mask.fill([1])
    assert mask.ending([1, letter]) is None
    mask.fill([1, letter])
    (end,) = compiler._ends
    assert [i for i in range(4096) if mask.bits[i >> 5] >> (i & 31) & 1] == [end]
    assert mask.ending([1, letter, end]) is FinishReason.STOP and mask.is_end(end)
