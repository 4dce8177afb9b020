"""Masks that take long: a step does not wait for them, and nothing but time is lost."""

from __future__ import annotations

import threading
import time

import pytest

from serve.config import default_model_path
from serve.request import FinishReason
from serve.runner.mask_filler import MaskFiller
from serve.scheduler.step_plan import StepPlan
from serve.structured import token_mask
from serve.structured.compiler import GrammarCompiler
from serve.structured.token_mask import TOO_COMPLEX, MaskBudget, Matcher, SequenceMask
from serve.structured_output import StructuredOutput
from serve.text.tokenizer import Tokenizer
from tests.support.engine.fakes import make_seq

WAIT_S = 10.0


class SlowMask:
    """Made when it may be."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.cost_s = cost_s
        self.job: object = None
        self.may_end = threading.Event()
        self.num_fills = 0
        self.begun = threading.Event()

    def fill(self, token_ids: list[int]) -> None:
        self.num_fills += 1
        self.begun.set()
        assert self.may_end.wait(WAIT_S)


@pytest.fixture
def filler():
    made = MaskFiller()
    made._num_threads = 1
    yield made
    made.close()


def sequences(*masks):
    found = []
    for mask in masks:
        sequence = make_seq()
        sequence.mask = mask
        found.append(sequence)
    return found


def plan_of_decodes(found):
    return StepPlan(found, [1] * len(found), len(found), [True] * len(found), len(found))


def quick(cost_s=0.0):
    mask = SlowMask(cost_s)
    mask.may_end.set()
    return mask


def test_who_is_late_is_in_a_later_step(filler):
    slow, behind = SlowMask(), quick(cost_s=1.0)
    found = sequences(slow, behind, None)
    plan = plan_of_decodes(found)
    masks = filler.begin(plan)
    late = masks.wait()
    assert late == {found[0], found[1]} and masks.wait() is late
    assert filler.begin(plan).wait() == late  # it is being made still
    slow.may_end.set()
    deadline = time.monotonic() + WAIT_S
    while filler.begin(plan).wait() and time.monotonic() < deadline:
        pass
    assert time.monotonic() < deadline
    assert slow.num_fills == 1, "what was made late is used"
    filler.begin(plan).wait()
    assert slow.num_fills == 2, "another step, another mask"


def test_one_at_least_is_made_where_nobody_else_is_in_the_step(filler):
    slow = SlowMask()
    found = sequences(slow, quick(cost_s=1.0))
    timer = threading.Timer(0.1, slow.may_end.set)
    timer.start()
    assert found[0] not in filler.begin(plan_of_decodes(found)).wait()
    timer.join()


def test_the_quick_ones_come_first_and_nobody_waits_for_ever(filler):
    order = []

    class Noting(SlowMask):
        def fill(self, token_ids):
            order.append(self.cost_s)

    blocker = SlowMask()
    found = sequences(blocker, Noting(3.0), Noting(1.0), Noting(2.0), None)
    late = filler.begin(plan_of_decodes(found)).wait()
    assert len(late) == 4
    found[1].mask.job.num_late = 5  # 3 / 6 is before 1 / 2
    masks = filler.begin(plan_of_decodes(found))
    blocker.may_end.set()
    while masks.wait():
        masks = filler.begin(plan_of_decodes(found))
    assert order[:3] == [3.0, 1.0, 2.0]


def test_what_counts_of_a_step_with_late_ones():
    one, late, prompt, late_prompt = sequences(None, None, None, None)
    plan = StepPlan([one, late, prompt, late_prompt], [1, 1, 5, 7], 2, [True] * 4, 14)
    part = plan.without_late({late, late_prompt})
    assert part.sequences == [one, prompt, late_prompt]
    assert (part.num_rows, part.num_decodes, part.num_total_rows) == ([1, 5, 6], 1, 12)
    assert part.samples == [True, True, False]
    assert plan.num_rows == [1, 1, 5, 7], "the runner's plan stays"


def test_a_budget_is_spent_and_saved(monkeypatch):
    budget = MaskBudget(1000)
    for _ in range(10_000):
        budget.add_mask(1e-4)
        budget.add_token(5e-5)
    assert budget.may_consume and not budget.is_spent, "what is usual goes on for ever"
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


def test_a_request_that_has_had_more_than_its_share_ends(compiler):
    budget = MaskBudget(compiler._vocab_size)
    mask, other = masks_of(compiler, "[a-z]+", 2, budget)
    mask.fill([1])
    assert mask.error is None
    budget.add_mask(100.0)
    other.fill([1])
    assert (other.error, other.ending([1, 2])) == (TOO_COMPLEX, FinishReason.ERROR)


def test_the_first_mask_is_made_once(compiler):
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


def test_tokens_that_are_taken_later_end_a_text_with_its_end(compiler, monkeypatch):
    """Where taking a token is slow it is not done between two steps."""
    monkeypatch.setattr(token_mask, "_USUAL_TOKEN_S", -1.0)  # nothing is ever saved
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
