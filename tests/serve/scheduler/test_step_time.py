"""The step-time model learns known step times despite noise, stalls and changes of speed."""

from __future__ import annotations

import random

import pytest

from serve.scheduler.step_time import GRANULARITY, LinearModel, StepTimeModel, StepWork
from tests.support.engine.fakes import make_kv, make_scheduler, make_seq


def cpu(work):
    """Seconds of a step that is bound by memory up to about 16 rows, then by the products."""
    products = max(26e-3, 7e-3 + 1.2e-3 * work.num_rows)
    return products + 5.6e-7 * work.num_context + 2.6e-7 * work.num_pairs + 2e-4 * work.num_chunks


def gpu(work):
    """Seconds of a step that is bound by memory up to 200 rows."""
    products = max(3e-3, 1.5e-5 * work.num_rows)
    return products + 1.7e-8 * work.num_context + 1.1e-9 * work.num_pairs


def make_work(num_decodes, context, rows=0, computed=0):
    work = StepWork(num_decodes, num_decodes * context, num_decodes, samples=num_decodes > 0)
    if rows:
        work.add(rows, computed)
    return work


def random_work(rng):
    rows = rng.choice([0, 0, rng.randint(2, 64), rng.randint(2, 512)])
    num_decodes = rng.randint(0 if rows else 1, 16)
    return make_work(num_decodes, rng.randint(10, 4000), rows, rng.randint(0, 20_000))


def trained(true_seconds, rng, *, steps=1500, noise=0.0, stalls=0.0):
    model = StepTimeModel(256)
    for _ in range(steps):
        work = random_work(rng)
        seconds = true_seconds(work) * rng.lognormvariate(0.0, noise)
        model.learn(work, seconds * (20.0 if rng.random() < stalls else 1.0))
    return model


def errors(model, true_seconds, rng, count=300):
    works = [random_work(rng) for _ in range(count)]
    return sorted(abs(model.predict(work) / true_seconds(work) - 1.0) for work in works)


def test_a_linear_model_learns_its_coefficients():
    rng = random.Random(0)
    linear = LinearModel(3)
    for _ in range(400):
        features = (rng.uniform(1, 100), 1.0, rng.uniform(0, 1e4))
        seconds = 2e-3 * features[0] + 3e-2 + 1e-6 * features[2]
        linear.learn(features, seconds * rng.lognormvariate(0.0, 0.02))
    assert linear.coefficients == pytest.approx([2e-3, 3e-2, 1e-6], rel=0.05)


def test_no_coefficient_is_negative():
    """This holds even where more work took less time."""
    linear = LinearModel(2)
    for step in range(200):
        value = 1.0 + step % 10
        linear.learn((value, 1.0), 1.0 - 0.05 * value)
    assert min(linear.coefficients) >= 0.0
    assert linear.predict((10.0, 1.0)) >= linear.predict((1.0, 1.0))


@pytest.mark.parametrize("true_seconds", [cpu, gpu])
def test_noise_and_stalls(true_seconds):
    """The noise is 5 %, and one step in a hundred takes twenty times as long."""
    rng = random.Random(1)
    model = trained(true_seconds, rng, noise=0.05, stalls=0.01)
    sorted_errors = errors(model, true_seconds, rng)
    assert sorted_errors[len(sorted_errors) // 2] < 0.05
    assert sorted_errors[int(0.9 * len(sorted_errors))] < 0.15
    assert model.median_error() < 0.1


def test_a_stalled_first_step_is_outweighed():
    rng = random.Random(2)
    model = StepTimeModel(256)
    work = make_work(8, 300)
    model.learn(work, 100 * cpu(work))
    for _ in range(30):
        model.learn(work, cpu(work) * rng.lognormvariate(0.0, 0.02))
    assert model.predict(work) == pytest.approx(cpu(work), rel=0.1)


def test_the_model_follows_a_machine_that_slows_down():
    rng = random.Random(3)
    model = trained(cpu, rng)
    for _ in range(800):
        work = random_work(rng)
        model.learn(work, 1.6 * cpu(work))
    sorted_errors = errors(model, lambda work: 1.6 * cpu(work), rng)
    assert sorted_errors[len(sorted_errors) // 2] < 0.05


def test_the_loss_of_a_core_is_noticed_within_few_steps():
    """The window alone would follow a change of the machine only in hundreds of steps."""
    rng = random.Random(8)
    model = trained(cpu, rng)
    for factor in (2.0, 1.0):
        for _ in range(6):
            for work in (make_work(8, 500, 64, 2000), make_work(8, 500)):
                model.learn(work, factor * cpu(work))
        for rows in (0, 16, 200):
            work = make_work(8, 500, rows, 3000)
            assert model.predict(work) == pytest.approx(factor * cpu(work), rel=0.1)


def test_the_error_is_that_of_predictions_before_learning():
    model = StepTimeModel(256)
    assert model.median_error() is None
    work = make_work(4, 100)
    model.learn(work, 0.1)
    assert model.median_error() is None, "nothing had been predicted"
    for _ in range(3):
        model.learn(work, 0.1)
    assert model.median_error() == pytest.approx(0.0, abs=1e-9)
    rng = random.Random(9)
    for _ in range(600):
        model.learn(work, 0.1 * rng.lognormvariate(0.0, 0.3))
    assert 0.15 < model.median_error() < 0.3


def test_predictions_around_the_first_step():
    model = StepTimeModel(256)
    work = make_work(8, 100)
    assert model.predict(work) == model.predict(StepWork()) == 0.0
    assert model.prefill_seconds(1000) == 0.0
    assert model.most_rows(work, 0, 256, 0.05) == 256
    model.learn(StepWork(), 1.0)  # an empty step
    model.learn(work, 0.0)
    assert model.predict(work) == 0.0
    model.learn(work, 0.02)
    assert model.predict(work) == pytest.approx(0.02)
    # It has seen no prompt row, so each is taken to cost as much as a row of that step.
    assert model.predict(make_work(8, 100, 24)) == pytest.approx(0.08)
    assert 0 < model.most_rows(work, 0, 256, 0.07) <= 24


def test_more_work_never_predicts_less():
    rng = random.Random(4)
    for steps in (0, 1, 3, 10, 50, 800):
        model = trained(cpu, rng, steps=steps, noise=0.2, stalls=0.02)
        for _ in range(100):
            rows, computed, decodes = rng.randint(2, 600), rng.randint(0, 9000), rng.randint(0, 9)
            least = model.predict(make_work(decodes, 500, rows, computed))
            more = (
                make_work(decodes + 1, 500, rows, computed),
                make_work(decodes, 500, rows + 7, computed),
                make_work(decodes, 500, rows, computed + 100),
            )
            assert all(model.predict(work) >= least * (1 - 1e-12) for work in more)
            assert least >= model.predict(make_work(decodes, 500)) * (1 - 1e-12) or not decodes


def test_the_largest_chunk_that_fits():
    model = trained(cpu, random.Random(5))
    work = make_work(8, 500)
    for limit_s in (0.03, 0.05, 0.1, 0.2, 0.4):
        for context in (0, 5000, 20_000):
            rows = model.most_rows(work, context, 250, limit_s)
            assert rows == 250 or rows % GRANULARITY == 0
            if rows:
                assert model.predict(make_work(8, 500, rows, context)) <= limit_s
            if rows < 250:
                more = make_work(8, 500, min(250, rows + GRANULARITY), context)
                assert model.predict(more) > limit_s
    assert model.most_rows(work, 0, 0, 1.0) == 0


def test_prefill_seconds():
    model = trained(cpu, random.Random(6))
    real, context = 0.0, 3000
    while context < 10_000:
        rows = min(256, 10_000 - context)
        real += cpu(make_work(0, 0, rows, context))
        context += rows
    assert model.prefill_seconds(10_000, 3000) == pytest.approx(real, rel=0.05)
    alone = make_work(0, 0, 40)
    assert model.prefill_seconds(40) == pytest.approx(cpu(alone), rel=0.1)
    assert model.prefill_seconds(40, 40) == 0.0


def test_the_margin_covers_the_noise():
    """Nearly all steps end within the prediction and its margin, which stalls do not widen."""
    rng = random.Random(7)
    model = StepTimeModel(256)
    late = total = 0
    for step in range(6000):
        work = make_work(8, 400, 16 * rng.randint(1, 8), rng.randint(0, 4000))
        seconds = cpu(work) * rng.lognormvariate(0.0, 0.05)
        if step > 1000:
            late += seconds > model.predict(work) * (1 + model.margin)
            total += 1
        model.learn(work, seconds * (30.0 if rng.random() < 0.02 else 1.0))
    assert late / total < 0.012
    assert 0.05 < model.margin < 0.25


def test_the_work_of_a_plan():
    scheduler = make_scheduler(make_kv()[0], budget=8)
    scheduler.add(make_seq(3, request_id="a"))
    scheduler.add(make_seq(12, request_id="b"))
    plan = scheduler.schedule(0.0)
    assert StepWork.of(plan) == StepWork(0, 0, 8, 4 + 12, 2, True)
    scheduler.update(plan, [7])
    plan = scheduler.schedule(0.0)
    assert StepWork.of(plan) == StepWork(1, 3, 8, 7 * 5 + 24, 1, True)
