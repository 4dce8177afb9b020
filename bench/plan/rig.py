"""Runs single steps of a real model on this machine, with any contexts and without a scheduler.

Pages are mapped and read but hold zeros instead of computed K/V, since a kernel's time does not
depend on values.
"""

from __future__ import annotations

import collections.abc as abc
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from serve.config import EngineConfig
from serve.loading.runtime import Runtime, load_runtime
from serve.request import Request
from serve.runner.runner import ModelRunner
from serve.sampling_params import SamplingParams
from serve.scheduler.sequence import Sequence, SequenceStatus, make_sequences
from serve.scheduler.step_plan import StepPlan, make_plan

_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)


class StepRig:
    """A loaded model. It is a context manager that frees its memory at exit."""

    def __init__(self, config: EngineConfig) -> None:
        self.runtime: Runtime = load_runtime(config)
        self._runner = ModelRunner(self.runtime.model, self.runtime.kv, self.runtime.attention)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.runtime.kv.close_all()
        self.runtime.memory.close()

    def open(self, contexts: abc.Sequence[int], chunks: abc.Sequence[tuple[int, int]]) -> StepPlan:
        """Returns a step with a decode row after each context and with chunks (rows, context). The
        caller frees its pages with `close`."""
        decodes = [self._sequence(context, 1) for context in contexts]
        prompts = [(self._sequence(context, rows), rows) for rows, context in chunks]
        plan = make_plan(decodes, prompts)
        assert plan is not None, "a step without rows"
        return plan

    def seconds(self, plan: StepPlan) -> float:
        """Runs the step and returns its seconds; a step can run repeatedly."""
        began = time.perf_counter()
        self._runner.run(plan, lambda: None)
        return time.perf_counter() - began

    def close(self, plan: StepPlan) -> None:
        for sequence in plan.sequences:
            assert sequence.kv_range is not None
            self.runtime.kv.close(sequence.kv_range)

    def _sequence(self, context: int, rows: int) -> Sequence:
        """Returns a running sequence that samples after its rows."""
        tokens = tuple(5 + i % 200 for i in range(context + rows))
        request = Request("step", None, tokens, _PARAMS, 0.0)
        (sequence,) = make_sequences(request, frozenset())
        kv = self.runtime.kv
        sequence.kv_range = kv.open(len(tokens))
        assert kv.grow(sequence.kv_range, len(tokens)), "K/V memory is too small"
        sequence.num_computed_tokens = context
        sequence.status = SequenceStatus.RUNNING
        return sequence


def rig_config(model: Path, dtype: str, kv_cache_bytes: int, max_model_len: int) -> EngineConfig:
    """Returns the configuration of an engine for a rig, without a prefix cache."""
    return EngineConfig(
        model=str(model),
        dtype=dtype,
        kv_cache_bytes=kv_cache_bytes,
        max_model_len=max_model_len,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        prefix_cache=False,
    )
