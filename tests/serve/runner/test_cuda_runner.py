"""The CUDA runner on a late device launches steps ahead and keeps what they still read."""

from __future__ import annotations

import errno
import functools
import random
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from serve import LLM, SamplingParams
from serve.errors import ConfigError, EngineStoppedError
from serve.loading import cuda_runtime
from serve.runner.cuda_runner import CudaRunner
from serve.runner.graph_shapes import StepShapes
from serve.runner.mask_filler import MaskFiller
from serve.runner.step_device import HostStepDevice
from serve.structured.token_mask import Matcher
from serve.structured_output import StructuredOutput
from tests.support.cuda.late_step_device import LateStepDevice
from tests.support.engine.checkpoints import checkpoint, reference_greedy

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels must be interpreted"),
]

NUM_TOKENS = 6


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStepDevice]:
    made = LateStepDevice(delay_s=0.01)
    monkeypatch.setattr(cuda_runtime, "make_step_device", lambda device: made)
    yield made
    made.stop()


def late_llm(**settings: object) -> LLM:
    base = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "kv_cache_bytes": 8 << 20}
    base["max_num_batched_tokens"] = 64  # the start computes the largest step
    return LLM(str(checkpoint("llama", "base")), backend="cuda", **(base | settings))


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 300) for _ in range(n)] for n in lengths]


def greedy(num_tokens: int = NUM_TOKENS, **params: object) -> SamplingParams:
    return SamplingParams(
        **({"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True} | params)
    )


@functools.cache
def expected(prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> list[int]:
    return reference_greedy(checkpoint("llama", "base"), list(prompt), num_tokens)


def test_a_step_is_launched_before_the_previous_one_has_ended(device):
    """The tokens are right, so nothing that the device reads late is overwritten."""
    prompts = prompts_of(1, 9, 3, 12)
    with late_llm() as llm:
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)
        assert llm.stats().pages_in_use == 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == expected(tuple(prompt))
    at = {(what, number): time for what, number, time in device.events}
    ahead = [at["submit", i + 1] < at["end", i] for i in range(device.num_submitted - 1)]
    assert sum(ahead) >= len(ahead) - 1, "at most one step waits, for a new request"
    assert all(at["begin", i + 1] >= at["end", i] for i in range(len(ahead)))


def test_at_most_two_steps_are_in_flight(device):
    with late_llm() as llm:
        llm.generate(prompts_of(2, 5), greedy(8), use_tqdm=False)
    at = {(what, number): time for what, number, time in device.events}
    for i in range(device.num_submitted - 2):
        assert at["submit", i + 2] > at["end", i]


def test_a_late_stop_token_leaves_no_trace(device):
    (prompt,) = prompts_of(3, 17)
    whole = expected(tuple(prompt), 8)
    stop = next(t for i, t in enumerate(whole) if i >= 2 and whole.index(t) == i)
    end = whole.index(stop)
    with late_llm() as llm:
        params = greedy(8, stop_token_ids=[stop], logprobs=2)
        output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
        assert llm.stats().pages_in_use == 0
    assert output.token_ids == whole[: end + 1] and len(output.logprobs) == end + 1


def test_a_step_waits_for_the_tokens_of_a_mask(device, monkeypatch):
    """A step with masked sequences is launched when their tokens are known, leaves out those whose
    masks are late, and changes no other sequence."""
    original, begin, end = Matcher.fill, MaskFiller.begin, MaskFiller.end
    is_mixed, is_late = threading.Event(), threading.Event()

    def slow(self, bits):
        if is_mixed.is_set():
            is_late.wait(30)
        original(self, bits)

    def beginning(self, plan):
        if any(sequence.mask is None for sequence in plan.sequences):
            is_mixed.set()
        return begin(self, plan)

    def ending(self, *args, **kwargs):
        late = end(self, *args, **kwargs)
        if late:
            is_late.set()
        return late

    monkeypatch.setattr(Matcher, "fill", slow)
    monkeypatch.setattr(MaskFiller, "begin", beginning)
    monkeypatch.setattr(MaskFiller, "end", ending)
    prompts = prompts_of(7, 9, 4, 6)
    choice = StructuredOutput("regex", "[ab]c")
    masked = [greedy(8, structured=choice), greedy(8, structured=choice, temperature=1.0, seed=3)]
    with late_llm() as llm:
        device.before = _fail_once(2)
        outputs = llm.generate(prompts, [*masked, greedy(3)], use_tqdm=False)
        assert llm.stats().pages_in_use == 0
    for output in outputs[:2]:
        assert re.fullmatch("[ab]c", output.outputs[0].text)
        assert output.outputs[0].finish_reason == "stop"
    assert is_late.is_set()
    assert outputs[2].outputs[0].token_ids == expected(tuple(prompts[2]), 3)


def test_steps_wait_only_where_reasoning_may_end(device, monkeypatch):
    """A bound on reasoning needs the tokens of a step before it is launched from the bound on, and
    until the end is written; a step that fails there is computed again."""
    waits = []
    original = CudaRunner.needs_tokens

    def needs(self, plan):
        waits.append(original(self, plan))
        return waits[-1]

    monkeypatch.setattr(CudaRunner, "needs_tokens", needs)
    prompts = prompts_of(11, 9, 4)
    bound = greedy(30, thinking_token_budget=6, is_reasoning_open=True)
    settings = {"reasoning_parser": "deepseek_r1", "reasoning_budget_message": ""}
    with late_llm(**settings) as llm:
        device.before = _fail_once(9)
        outputs = llm.generate(prompts, [bound, greedy(20)], use_tqdm=False)
        end = llm.tokenizer.encode("\n</think>\n\n", add_special_tokens=False)
    with LLM(str(checkpoint("llama", "base")), dtype="float32", max_num_seqs=4, **settings) as llm:
        on_cpu = llm.generate(prompts[0], bound, use_tqdm=False)[0].outputs[0].token_ids
    forced = outputs[0].outputs[0].token_ids
    assert forced[:6] == expected(tuple(prompts[0]), 6)
    assert end[0] in forced[6:10]
    begin = forced.index(end[0], 6)
    assert forced[begin : begin + len(end)] == end
    assert forced == on_cpu and len(forced) == 30
    assert outputs[1].outputs[0].token_ids == expected(tuple(prompts[1]), 20)
    assert sum(waits) < len(end) + 8 and not any(waits[:4]) and not any(waits[-6:])


def _fail_once(step: int) -> Callable[[int], None]:
    failures = iter([False] * step + [True])

    def before(number: int) -> None:
        if next(failures, False):
            raise RuntimeError("a device error")

    return before


def test_a_single_fault_of_the_device_ends_no_request(device):
    """The step is halved, since the request at fault is unknown, and the halves succeed."""
    failures = iter([False, False, True])

    def before(number: int) -> None:
        if next(failures, False):
            raise RuntimeError("a device error")

    prompts = prompts_of(4, 9, 4)
    with late_llm() as llm:
        device.before = before
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)
        assert llm.stats().pages_in_use == 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == expected(tuple(prompt))


def test_out_of_memory_ends_one_request(device):
    """Pages of one of three sequences cannot be mapped any more."""
    prompts = prompts_of(5, 10, 30, 7)
    with late_llm(kv_page_bytes=8192) as llm:
        memory = llm._loaded.core.kv._memory
        kv = llm._loaded.core.kv
        map_pages = memory.map
        victims: list[int] = []

        def failing(offset: int, first_page: int, num_pages: int) -> None:
            index = offset // (kv.range_tokens * kv.token_bytes)
            long = [r.index for r in kv.ranges if r.is_open and r.promised_tokens == 30]
            if victims or (long and index in long):
                victims.extend(long)
            if index in victims:
                raise OSError(errno.ENOMEM, "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
            map_pages(offset, first_page, num_pages)

        memory.map = failing
        outputs = llm.generate(prompts, greedy(), use_tqdm=False)
        memory.map = map_pages
        assert llm.stats().pages_in_use == 0
        again = llm.generate([prompts[1]], greedy(), use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    for i in (0, 2):
        assert outputs[i].outputs[0].token_ids == expected(tuple(prompts[i]))
    assert again[0].outputs[0].token_ids == expected(tuple(prompts[1]))


def test_the_memory_of_a_failed_step_is_free_for_its_halves():
    """Steps of two sequences run out of memory while they hold a tensor."""
    prompts = prompts_of(8, 5, 6)
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    with late_llm() as llm:
        model = llm._loaded.core._runner._model
        forward = model.forward

        def too_large(ids: torch.Tensor, *args: object) -> torch.Tensor:
            alive.append(sum(ref() is not None for ref in held))
            if len(ids) == 2:
                activations = torch.zeros(1000)
                held.append(weakref.ref(activations))
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(ids, *args)

        model.forward = too_large
        outputs = llm.generate(prompts, greedy(4), use_tqdm=False)
        model.forward = forward
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == expected(tuple(prompt), 4)
    assert held and max(alive) == 0


def test_a_launch_that_fails_half_way_is_waited_for(device):
    """Its kernels are queued, but their event is lost."""
    (prompt,) = prompts_of(9, 5)
    with late_llm() as llm:
        submit, done = device.submit, []

        def half(work: Callable[[], None]) -> object:
            event = submit(lambda: (work(), done.append(1)))
            device.submit = submit
            raise torch.OutOfMemoryError(f"CUDA out of memory after {event}")

        device.submit = half
        waits: list[int] = []
        wait = device.wait
        device.wait = lambda: (wait(), waits.append(len(done)))
        output = llm.generate([prompt], greedy(), use_tqdm=False)[0].outputs[0]
        device.wait = wait
        assert waits[0] == 1, "the queued kernels have ended"
        assert output.finish_reason == "error"
        again = llm.generate([prompt], greedy(), use_tqdm=False)[0].outputs[0]
    assert again.token_ids == expected(tuple(prompt))


def test_a_lost_device_stops_the_engine(device):
    """Requests end with an error, new ones are refused, and a shutdown works."""
    prompts = prompts_of(10, 5, 6)

    def before(number: int) -> None:
        device.is_lost = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    llm = late_llm()
    device.before = before
    outputs = llm.generate(prompts, greedy(), use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error"]
    assert llm._loaded.core.has_failed
    with pytest.raises(EngineStoppedError):
        llm.generate(prompts[:1], greedy(), use_tqdm=False)
    llm.shutdown()
    assert not llm._loaded.core._output.is_alive()


def test_unmapping_waits_for_steps_that_may_read_the_pages(device):
    with late_llm() as llm:
        llm.generate(prompts_of(6, 5), greedy(2), use_tqdm=False)
        core = llm._loaded.core
        runner, kv = core._runner, core.kv
        step = runner._launched[-1]
        (span,) = kv.spans(step.ranges[0])
        waited: list[int] = []
        step.event = type("M", (), {"wait": lambda self: waited.append(1)})()
        others = [kv.spans(r)[0] for r in kv.ranges if kv.spans(r)[0] != span]
        for first, end in others:
            runner.settle(first, end)
        assert waited == []
        runner.settle(span[0] + 4096, span[0] + 8192)
        assert waited == [1]


def test_warm_up_captures_all_sizes_without_side_effects(device):
    """The captured rows belong to no sequence; real steps then replay the captures."""
    (prompt,) = prompts_of(7, 5)
    with late_llm(max_num_seqs=2, max_num_batched_tokens=16) as llm:
        runner = llm._loaded.core._runner
        runner.warm_up()
        assert set(runner._graphs) == set(runner._shapes.captured)
        used: list[int] = []
        for shape, graph in list(runner._graphs.items()):
            runner._graphs[shape] = lambda g=graph, s=shape: (used.append(s.rows), g())
        output = llm.generate([prompt], greedy(), use_tqdm=False)[0].outputs[0]
        assert llm.stats().pages_mapped <= 2
    assert output.token_ids == expected(tuple(prompt))
    assert used[0] == 16 and used[1:] == [1] * (NUM_TOKENS - 1)


def test_steps_that_cannot_be_captured_run_kernel_by_kernel(device, caplog):
    (prompt,) = prompts_of(8, 5)
    asked: list[object] = []

    def refuse(work: object) -> object:
        asked.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    device.capture = refuse
    with late_llm(max_num_seqs=2, max_num_batched_tokens=16) as llm:
        runner = llm._loaded.core._runner
        runner.warm_up()
        assert len(asked) == 1 and not runner._graphs
        output = llm.generate([prompt], greedy(), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == expected(tuple(prompt))
    assert "cannot be captured" in caplog.text


class _Sized(HostStepDevice):
    """A device with the given free memory and peak of a step."""

    def __init__(self, free_bytes: int, peak_bytes: int) -> None:
        self._free, self._peak = free_bytes, peak_bytes

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        return self._peak

    def free_bytes(self) -> int:
        return self._free


def test_kv_gets_the_memory_beside_the_largest_step():
    asked: list[tuple[int, ...]] = []

    def forward(
        ids: torch.Tensor, positions: torch.Tensor, attention: object, before: torch.Tensor | None
    ) -> torch.Tensor:
        assert before is None, "a model with an embedding begins at token ids"
        asked.append(tuple(ids.shape))
        return torch.zeros(len(ids), 8)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        asked.append(tuple(rows.shape))
        return torch.zeros(len(rows), 10)

    whole = SimpleNamespace(embed=object(), head=object())
    model = SimpleNamespace(attention_layers=list, forward=forward, logits=logits, weights=whole)
    shapes = StepShapes(300, 16)
    gib = 1 << 30
    left = cuda_runtime.kv_bytes(model, _Sized(4 * gib, gib // 2), shapes, gib // 2)
    assert left == 4 * gib - gib - gib // 4 - gib // 2
    assert asked == [(300,), (16, 8)], "the largest step, with logits for every sequence"
    with pytest.raises(ConfigError, match=r"1024 MiB left.*300 rows.*lower max_num_batched_tokens"):
        cuda_runtime.kv_bytes(model, _Sized(gib, gib // 2), shapes, 0)
