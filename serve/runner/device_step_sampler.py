"""Samples the tokens of one step on a device, and waits for them."""

from __future__ import annotations

import collections.abc as abc

import torch
from torch import Tensor

from ops.cuda.device_sampler import DeviceSampler, Kind
from serve.runner.runner import StepResult
from serve.runner.sampling_rows import rows_of
from serve.runner.sampling_rows import sampled as fetched_tokens
from serve.runner.step_device import StepDevice
from serve.scheduler.prompt_outputs import PromptPart
from serve.scheduler.sequence import Sequence


class DeviceStepSampler:
    """Draws what CudaRunner draws, one step at a time: the host knows all earlier tokens."""

    def __init__(
        self, vocab_size: int, max_sampled: int, max_seqs: int, device: StepDevice
    ) -> None:
        self._device = device
        self._sampler = DeviceSampler(vocab_size, max_sampled, max_seqs, device.device)
        if device.device.type == "cuda":
            self._sampler.allocate_counts()  # a new size recompiles kernels
            self.warm_up()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Launches all kernels without a sequence, so that none is compiled while a request
        waits."""
        sampler = self._sampler
        logits = torch.zeros(sampler.max_rows, sampler.vocab_size, device=sampler.device)
        sampler.warm_up_masks(logits[:1])
        nothing = sampler.plan([])
        for kind in Kind:
            sampler.upload(nothing)
            sampler.run(logits, kind)
            sampler.fetch(kind, sampler.max_rows)
        self._device.wait()

    def __call__(
        self,
        logits: Tensor,
        sampled: list[Sequence],
        prompts: abc.Sequence[PromptPart],
        late: frozenset[Sequence],
        *,
        num_drafted: int = 0,
    ) -> StepResult:
        """Returns the tokens of a step whose masks are complete; logits: [len(sampled), vocab],
        which are overwritten. Late sequences get none."""
        assert not num_drafted, "drafts are not sampled on the device"
        slots = [s.kv_range.index for s in sampled if s.kv_range is not None]
        plan = self._sampler.plan(rows_of(sampled, slots))
        self._sampler.upload(plan)
        self._sampler.run(logits, plan.kind)
        fetched = self._sampler.fetch(plan.kind, len(sampled))
        self._device.wait()
        found = fetched_tokens(plan, fetched)
        result = StepResult(sampled, found.token_ids, found.logprobs, prompts, late)
        return result.without(late) if late else result
