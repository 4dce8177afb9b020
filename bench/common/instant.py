"""An engine whose device takes no time: everything that remains is our own machinery.

`InstantRunner` does what the real runner does around the model (commit pages, flatten the
batch) and returns scripted tokens at once. Used by bench/engine/engine_overhead.py and by tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from memory.kv_manager import KVManager
from memory.pages.vmm import LinuxMemory
from serve.config import EngineConfig
from serve.engine.loader import LoadedEngine, Parts
from serve.engine.request_limits import RequestLimits
from serve.engine.threads import ComputeThread
from serve.models import ModelSpec, read_spec
from serve.runner.batch import make_batch
from serve.runner.runner import Runner, StepResult
from serve.scheduler.admission import make_policy
from serve.scheduler.orders import make_queue
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import SchedulerLimits, StepPlan
from serve.text.tokenizer import Tokenizer

TokenScript = Callable[[Sequence], int]
"""The next token of a sequence."""


class InstantRunner:
    """Answers every step at once.

    gaps_s: from the end of a step to the start of the next one; batch_s: what the runner does
    before the model; rows: of each step.
    """

    def __init__(self, kv: KVManager, script: TokenScript) -> None:
        self._kv = kv
        self._script = script
        self.gate = threading.Event()  # cleared: the device is busy with something else
        self.gate.set()
        self.reset()

    def reset(self, device_s: float = 0.0) -> None:
        """Forget the measurements; from now on the device takes that long for a step."""
        self._device_s = device_s
        self._ended_s: float | None = None
        self.gaps_s: list[float] = []
        self.batch_s: list[float] = []
        self.rows: list[int] = []

    def run(self, plan: StepPlan, launched: Callable[[], None]) -> StepResult:
        self.gate.wait()
        began = time.perf_counter()
        if self._ended_s is not None:
            self.gaps_s.append(began - self._ended_s)
        self._kv.commit(s.kv_range for s in plan.sequences if s.kv_range is not None)
        batch = make_batch(plan)
        self.rows.append(plan.num_total_rows)
        self.batch_s.append(time.perf_counter() - began)
        launched()
        if self._device_s:
            time.sleep(self._device_s)
        tokens = [self._script(sequence) for sequence in batch.sampled]
        self._ended_s = time.perf_counter()
        return StepResult(batch.sampled, tokens, None)

    def close(self) -> None:
        """Nothing is held."""


def load_instant(
    config: EngineConfig,
    *,
    progress: bool = False,
    script: TokenScript = lambda sequence: 97 + len(sequence.token_ids) % 26,
    make_runner: Callable[[KVManager], Runner] | None = None,
    num_pages: int = 4096,
    token_bytes: int = 2560,
    parts: Parts | None = None,
) -> LoadedEngine:
    """A LoadedEngine like load_engine's, with the model's tokenizer but no weights."""
    made_of = parts or Parts()
    spec: ModelSpec = read_spec(config.model_path)
    tokenizer = Tokenizer.load(config.model_path)
    max_len = config.max_model_len or spec.max_model_len
    memory = LinuxMemory(config.kv_page_bytes or 64 << 10, num_pages)
    kv = KVManager(
        memory,
        num_pages=num_pages,
        num_ranges=config.max_num_seqs,
        max_model_len=max_len,
        token_bytes=token_bytes,
    )
    memory.reserve(kv.total_bytes)
    batched = config.max_num_batched_tokens or 512
    limits = SchedulerLimits(
        config.max_num_seqs,
        batched,
        config.max_chunk_tokens or batched,
        config.inter_token_slo_s,
    )
    runner = make_runner(kv) if make_runner is not None else InstantRunner(kv, script)
    request_limits = RequestLimits(
        max_len,
        spec.vocab_size,
        config.max_num_waiting,
        config.max_num_seqs,
        config.ttft_slo,
    )
    core = made_of.core(
        runner=runner,
        scheduler=made_of.scheduler(
            limits,
            kv,
            make_policy(config.memory_policy, kv, batched),
            order=make_queue(config.order),
        ),
        kv=kv,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(spec.eos_token_ids),
        limits=request_limits,
        compute=ComputeThread(),
        tokenize_threads=config.tokenize_threads,
    )
    return LoadedEngine(core, spec, tokenizer, request_limits, {})
