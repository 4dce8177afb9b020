"""An engine whose device takes no time, so that only the engine's own work remains.

`InstantRunner` does what the real runner does around the model (it commits pages and flattens
the batch) and returns scripted tokens at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from memory.kv_manager import KVManager
from memory.pages.linux_vmm import LinuxMemory
from serve.config import EngineConfig
from serve.engine.chat_prompt import make_chat_template, reasoning_end
from serve.engine.loader import LoadedEngine, Parts
from serve.engine.pools import ComputeThread
from serve.engine.request_limits import RequestLimits
from serve.models import ModelSpec, read_spec
from serve.runner.batch import make_batch
from serve.runner.runner import Runner, StepResult
from serve.scheduler.admission import make_policy
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import SchedulerLimits, StepPlan
from serve.scheduler.waiting_queue import make_queue
from serve.text.tokenizer import Tokenizer

TokenScript = Callable[[Sequence], int]
"""Returns the next token of a sequence."""


class InstantRunner:
    """Answers every step at once.

    For each step, gaps_s has the seconds since the previous step's end, batch_s the seconds of the
    work before the model, and rows the number of rows.
    """

    def __init__(self, kv: KVManager, script: TokenScript) -> None:
        self._kv = kv
        self._script = script
        self.gate = threading.Event()  # a cleared gate is a busy device
        self.gate.set()
        self.reset()

    def reset(self, device_s: float = 0.0) -> None:
        """Discards the measurements; from now on the device takes device_s for a step."""
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
        """Does nothing, as the runner holds nothing."""


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
    """Returns a LoadedEngine like load_engine's, with the model's tokenizer but no weights."""
    parts = parts or Parts()
    spec: ModelSpec = read_spec(config.model_path)
    tokenizer = Tokenizer.load(config.tokenizer_path, model=config.model_path)
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
    config = replace(config, max_num_batched_tokens=batched)
    runner = make_runner(kv) if make_runner is not None else InstantRunner(kv, script)
    request_limits = RequestLimits(
        max_len,
        spec.vocab_size,
        config.max_num_waiting,
        config.max_num_seqs,
        config.ttft_slo,
        reasoning=reasoning_end(tokenizer, config),
    )
    core = parts.core(
        runner=runner,
        scheduler=parts.scheduler(
            SchedulerLimits.of(config),
            kv,
            make_policy(config.memory_policy, kv, batched),
            queue=make_queue(config.order),
        ),
        kv=kv,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(spec.eos_token_ids),
        limits=request_limits,
        compute=ComputeThread(),
        tokenize_threads=config.tokenize_threads,
    )
    return LoadedEngine(core, spec, tokenizer, request_limits, {}, make_chat_template(tokenizer))
