"""Steps of the device's sampler: plans, histories, edits, log-probabilities, input ids."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ops.cpu import sampling
from ops.cuda import device_sampler as device_sampling
from ops.cuda.device_sampler import Kind, described
from ops.cuda.sampling_inputs import DeviceSamplingInputs, Row
from ops.triton_kernels import logits as logits_kernels
from ops.triton_kernels import sample_token
from ops.triton_kernels import sampling as sampling_kernels
from ops.triton_kernels.sampling import Config
from tests.support.cuda.device_sampling import DEVICE, make_sampler, step

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PENALTIES = [
    {"repetition": 1.7},
    {"presence": 1.5},
    {"frequency": -0.5},
    {"repetition": 0.5, "presence": -1.0, "frequency": 0.75},
]


def adjusted(logits, rows):
    """Returns the logits after the native kernels' penalties and edits; rows: (arguments,
    tokens, held)."""
    packed = sampling.packed_rows(len(rows))
    choices = [
        sampling.SamplingInputs(**arguments) for arguments, _, _ in rows
    ]  # plans point into these
    for i, (_, tokens, is_held) in enumerate(rows):
        choices[i].pack(packed, i, tokens, is_held)
    logits = logits.clone()
    sampling.sample(logits, packed)
    return logits


def test_kinds():
    sampler = make_sampler(50)
    plain = DeviceSamplingInputs(seed=0, temperature=0.0, forbidden=[3])
    for choice, is_held, kind in (
        (plain, False, Kind.GREEDY),
        (plain, True, Kind.FULL),
        (DeviceSamplingInputs(seed=0, temperature=0.5), False, Kind.FULL),
        (DeviceSamplingInputs(seed=0, temperature=0.0, presence=0.5), False, Kind.FULL),
        (DeviceSamplingInputs(seed=0, temperature=0.0, biases={1: 2.0}), False, Kind.FULL),
        (DeviceSamplingInputs(seed=0, temperature=0.0, num_logprobs=0), False, Kind.DESCRIBED),
    ):
        assert sampler.plan([Row(plain, 0, [1]), Row(choice, 1, [1, 2], is_held)]).kind == kind
    assert sampler.plan([]).kind == Kind.GREEDY


@pytest.mark.skipif(not sampling.is_available(), reason="not built")
def test_penalties_and_edits_equal_the_cpus():
    size = 300
    sampler = make_sampler(size, max_rows=8)
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(1)) * 4
    tokens = [[5, 9, 9, 17, 17, 17, 250, 5], [1, 2], [7, 7, 7, 299], [0, 1, 2, 0], [1], [8, 8]]
    arguments = [{"num_prompt": 3, **each} for each in PENALTIES]
    arguments += [
        {"biases": {3: 2.5, 290: -100.0, 257: 0.25}},
        {"biases": {4: 1.0}, "frequency": 1.0},
    ]
    arguments = [
        {
            "seed": 0,
            "temperature": 0.0,
            "forbidden": [4, 256],
            **each,
            "num_prompt": each.get("num_prompt", 1),
        }
        for each in arguments
    ]
    arguments[1]["num_prompt"] = 2
    held = [False, True, False, False, True, True]
    rows = [
        Row(DeviceSamplingInputs(**each), i, tokens[i], held[i]) for i, each in enumerate(arguments)
    ]
    plan = sampler.plan(rows)
    sampler.upload(plan)
    on_device = logits.clone().to(DEVICE)
    sampler.run(on_device, plan.kind)
    expected = adjusted(logits, list(zip(arguments, tokens, held, strict=True)))
    assert not torch.equal(expected, logits)
    assert torch.equal(on_device.cpu(), expected)


@pytest.mark.parametrize("is_known", [True, False])
def test_counts_include_tokens_that_the_host_does_not_have(is_known):
    """Two sequences have penalties, and both lose their rows of the table in between."""
    size, num_steps = 40, 6
    logits = torch.randn(num_steps, 2, size, generator=torch.Generator().manual_seed(2))
    arguments = {
        "seed": 0,
        "temperature": 0.0,
        "frequency": 2.0,
        "repetition": 1.2,
        "num_prompt": 2,
    }

    def run(sampler, pending):
        histories = [[3, 4], [5, 6]]
        choices = [DeviceSamplingInputs(**arguments), DeviceSamplingInputs(**arguments)]
        got = []
        for n in range(num_steps):
            hidden = [[*h[:-1], -1] if n and pending else list(h) for h in histories]
            rows = [Row(choice, 5 - i, hidden[i]) for i, choice in enumerate(choices)]
            if n == 3:  # other sequences need both rows
                other = [Row(DeviceSamplingInputs(**arguments), 9, [1, 1]) for _ in range(2)]
                step(sampler, logits[n], other)
            plan, tokens = step(sampler, logits[n], rows)
            assert len(plan.counts) == (2 if n in (0, 3) else 0)
            for history, token in zip(histories, tokens, strict=True):
                history.append(token)
            got.append(tokens)
        expected = torch.zeros(2, size, dtype=torch.int64)
        for i, history in enumerate(histories):
            expected[i] = torch.bincount(torch.tensor(history[2:]), minlength=size)
            expected[i, history[:2]] |= 1 << 30
        counted = sampler.token_counts[[choice.counts_row for choice in choices]]
        assert torch.equal(counted.cpu().long(), expected)
        return got

    got = run(make_sampler(size, max_rows=2), pending=not is_known)
    reference = logits.clone()
    histories = [[3, 4], [5, 6]]
    if not sampling.is_available():
        return
    for n in range(num_steps):
        rows = [(arguments, history, False) for history in histories]
        expected = adjusted(reference[n], rows).argmax(-1).tolist()
        assert got[n] == expected
        for history, token in zip(histories, expected, strict=True):
            history.append(token)


def test_a_step_that_is_repeated_counts_once():
    sampler = make_sampler(20, max_rows=1)
    choice = DeviceSamplingInputs(seed=0, temperature=0.0, presence=1.0, num_prompt=1)
    logits = torch.zeros(1, 20)
    logits[0, 7] = 5.0
    for _ in range(3):
        assert step(sampler, logits, [Row(choice, 0, [2])])[1] == [7]
    assert sampler.token_counts[0, 7] == 1
    assert step(sampler, logits, [Row(choice, 0, [2, 7])])[1] == [7]
    assert sampler.token_counts[0, 7] == 2


def test_tokens_beyond_the_vocabulary():
    sampler = make_sampler(20)
    forbidding = DeviceSamplingInputs(seed=0, temperature=0.0, forbidden=[20])
    for row in (
        Row(DeviceSamplingInputs(seed=0, temperature=0.0, biases={20: 1.0}), 0, [1]),
        Row(forbidding, 0, [1], True),
        Row(DeviceSamplingInputs(seed=0, temperature=0.0, presence=1.0), 0, [1, 20]),
    ):
        with pytest.raises(IndexError, match="beyond the vocabulary of 20"):
            sampler.plan([row])
    assert sampler.plan([Row(forbidding, 0, [1])]).edits is None


def test_input_ids():
    sampler = make_sampler(50)
    sampler.last_tokens.copy_(torch.arange(100, 116))
    given = torch.tensor([7, -1, -1, 0, -1], device=DEVICE)
    slots = torch.tensor([3, 15, 0, 2, 3], device=DEVICE)
    expected = [7, 115, 100, 0, 103]
    assert sampler.input_ids(given, slots).tolist() == expected
    got = sampler.input_ids(given.int(), slots.int())
    assert got.dtype == torch.int64
    assert got.tolist() == expected
    many = torch.full((600,), -1, device=DEVICE)
    assert set(sampler.input_ids(many, torch.ones_like(many)).tolist()) == {101}
    assert sampler.input_ids(given[:0], slots[:0]).shape == (0,)


def test_last_tokens_are_the_slots():
    sampler = make_sampler(30, max_rows=4)
    sampler.last_tokens.fill_(-7)
    logits = torch.eye(30)[[4, 9, 2]]
    greedy = DeviceSamplingInputs(seed=0, temperature=0.0)
    drawn = DeviceSamplingInputs(seed=0, temperature=1.0, top_k=1)
    for choice in (greedy, drawn):
        rows = [Row(choice, slot, [1]) for slot in (11, 3, 0)]
        assert step(sampler, logits, rows)[1] == [4, 9, 2]
        assert sampler.last_tokens[[11, 3, 0]].tolist() == [4, 9, 2]
    assert int((sampler.last_tokens == -7).sum()) == 13


def test_logprobs_are_of_the_raw_logits():
    size = 300
    sampler = make_sampler(size)
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(3)) * 3
    logits[2, 5:] = float("-inf")
    logits[3] = logits[3].round()  # ties
    common = {"seed": 0, "temperature": 0.0}
    choices = [
        DeviceSamplingInputs(**common, num_logprobs=20, biases={77: 100.0}),
        DeviceSamplingInputs(**common, num_logprobs=0, presence=1.0),
        DeviceSamplingInputs(**common, num_logprobs=20),
        DeviceSamplingInputs(**common),
    ]
    rows = [Row(choice, i, [1, 2]) for i, choice in enumerate(choices)]
    plan, tokens = step(sampler, logits, rows)
    found = described(sampler.fetch(plan.kind, 4), rows)
    raw = torch.log_softmax(logits.double(), -1)
    assert found[3] is None
    for i, each in enumerate(found[:3]):
        assert each.token_id == tokens[i]
        assert each.logprob == pytest.approx(float(raw[i, tokens[i]]), abs=1e-6)
        assert each.rank == 1 + int((logits[i] > logits[i, tokens[i]]).sum())
        values, ids = torch.sort(raw[i], descending=True, stable=True)
        count = [20, 0, 5][i]
        assert [token for token, _ in each.top] == ids[:count].tolist()
        assert [value for _, value in each.top] == pytest.approx(values[:count].tolist(), abs=1e-6)
    assert tokens[0] == 77 and found[0].rank > 1


def test_fetched_tokens_are_on_the_host():
    sampler = make_sampler(30)
    plan, tokens = step(
        sampler,
        torch.eye(30)[:3],
        [Row(DeviceSamplingInputs(seed=0, temperature=0.0), i, [1]) for i in range(3)],
    )
    fetched = sampler.fetch(plan.kind, 3)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert fetched.tokens.device.type == "cpu"
    assert fetched.tokens.tolist() == tokens == [0, 1, 2]
    assert fetched.logprobs is None


class Launches:
    """Stands in for a kernel and checks that the keywords are its parameters, as the interpreter
    ignores others."""

    def __init__(self, kernel, seen):
        self._kernel, self._seen = kernel, seen

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, *args, **kwargs):
        kwargs.pop("num_warps")
        kwargs.pop("enable_fp_fusion", None)
        assert {*self._kernel.arg_names[: len(args)], *kwargs} == set(self._kernel.arg_names)
        self._seen.append(self._kernel)


def test_kernels_get_their_parameters(monkeypatch):
    seen, kernels = [], []
    separate = {
        "input_ids_kernel",
        "mask_kernel",
    }  # only steps with masks or input ids launch these
    for module in (sampling_kernels, sample_token, logits_kernels):
        for name in [n for n in vars(module) if n.endswith("_kernel") and n not in separate]:
            kernels.append(getattr(module, name))
            for target in (module, device_sampling):
                monkeypatch.setattr(target, name, Launches(kernels[-1], seen), raising=False)
    sampler = make_sampler(30)
    for kind in (Kind.GREEDY, Kind.DESCRIBED):
        sampler.run(torch.zeros(2, 30, device=DEVICE), kind)
    assert {id(kernel) for kernel in seen} == {id(kernel) for kernel in kernels}


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device")
def test_steps_are_captured_in_graphs():
    """A graph of four rows is replayed with other plans than the one it was captured with."""
    size = 128_256
    sampler = make_sampler(size, config=Config())
    sampler.allocate_counts()
    static = torch.zeros(4, size, device=DEVICE)
    for kind in Kind:
        sampler.upload(sampler.plan([]))
        sampler.run(static.clone(), kind)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sampler.run(static, kind)
        for seed in range(3):
            logits = torch.randn(4, size, device=DEVICE) * 3
            arguments = {"seed": seed, "temperature": 0.0 if kind is Kind.GREEDY else 1.0}
            if kind is not Kind.GREEDY:
                arguments |= {"top_p": 0.9, "presence": 0.5, "biases": {3: 1.0}}
            rows = [Row(DeviceSamplingInputs(**arguments), i, [1, 2, 3]) for i in range(3)]
            expected = step(sampler, logits, rows)[1]
            sampler.upload(
                sampler.plan(
                    [row._replace(choice=DeviceSamplingInputs(**arguments)) for row in rows]
                )
            )
            static.copy_(logits)
            graph.replay()
            assert sampler.tokens[:3].tolist() == expected[:3]
