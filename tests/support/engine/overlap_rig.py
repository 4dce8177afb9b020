"""A scheduler and a step executor on a late device, advanced by hand."""

from __future__ import annotations

from collections import defaultdict

from memory.kv_manager import KVManager
from memory.pages.layer_groups import LayerGroup
from memory.prefix.index import PrefixHasher
from serve.engine.overlapped_executor import make_executor
from serve.scheduler.admission import make_policy
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import PENDING_TOKEN, make_sequences
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.waiting_queue import make_queue
from tests.support.cuda.late_device import LateDevice, LateMemory, PipelineMemory
from tests.support.cuda.late_runner import EOS, LateRunner
from tests.support.engine.fakes import make_request

PAGE_BYTES = 320  # 5 tokens of FULL
FULL = (LayerGroup(64),)


class Records:
    """What the output thread would get: tokens by sequence, and the sequences that ended with a
    step."""

    def __init__(self):
        self.tokens = defaultdict(list)
        self.ended = []

    def add(self, record):
        for sequence, token, described in zip(
            record.sequences, record.tokens, record.logprobs, strict=True
        ):
            assert described.token_id == token
            self.tokens[sequence].append(token)
        self.ended += record.finished

    def flush(self):
        pass


class SynchronousRunner:
    """The same runner without `launch`, so that steps are not overlapped."""

    def __init__(self, runner):
        self.run = runner.run
        self.close = runner.close


class Bench:
    """num_pages: pages beyond what one sequence of max_len needs. ended: why `_end` ended a
    sequence."""

    def __init__(
        self,
        limits=None,
        *,
        num_pages=100,
        max_len=96,
        groups=FULL,
        cache=False,
        queue_policy="fcfs",
        policy="prompt_only",
        seconds=0.0,
        overlaps=True,
        depth=2,
        tokens_on_device=True,
        **settings,
    ):
        self.limits = limits or SchedulerLimits(4, 32, 32)
        self.device = LateDevice(seconds, num_stages=1 if tokens_on_device else depth)
        make_memory = LateMemory if tokens_on_device else PipelineMemory
        self.memory = make_memory(PAGE_BYTES, self.device)
        kv_settings = {
            "num_ranges": self.limits.max_num_seqs,
            "max_model_len": max_len,
            "groups": groups,
            "max_rows": self.limits.max_chunk_tokens,
            "in_background": False,
        }
        longest = KVManager(self.memory, num_pages=1, **kv_settings).pages_for(max_len)
        self.kv = KVManager(self.memory, num_pages=longest + num_pages, **kv_settings)
        self.scheduler = Scheduler(
            self.limits,
            self.kv,
            make_policy(policy, self.kv, self.limits.max_num_batched_tokens),
            PrefixHasher(self.kv.page_end) if cache else None,
            make_queue(queue_policy),
        )
        self.runner = LateRunner(
            self.kv,
            self.device,
            self.memory,
            depth=depth,
            tokens_on_device=tokens_on_device,
            **settings,
        )
        self.records = Records()
        self.ended = {}
        self.steps = make_executor(
            self.runner if overlaps else SynchronousRunner(self.runner),
            self.scheduler,
            self.records,
            end_sequence=self._end,
            on_finished=lambda finished: None,
            on_nodes_lost=None,
            clock=lambda: self.device.now_s,
        )

    def _end(self, sequence, reason, error=None):
        assert self.scheduler.finish(sequence, reason)
        self.ended[sequence] = reason

    def add(self, request_id="r", num_prompt=5, num_tokens=8, **params):
        """Adds one sequence; its only stop token is EOS, unless it ignores that."""
        params = {"ignore_eos": True} | params
        request = make_request(num_prompt, request_id, num_tokens, **params)
        (sequence,) = make_sequences(request, frozenset({EOS}))
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        """Runs a step and returns its plan, or None after the oldest step in flight is
        completed."""
        plan = self.scheduler.schedule(self.device.now_s)
        if plan is None:
            assert self.steps.complete_oldest(), "nothing can be scheduled"
        else:
            self.steps.run(plan, self.device.now_s)
        return plan

    def run(self):
        """Runs until all sequences have ended."""
        for _ in range(1000):
            if not self.scheduler.has_work():
                self.steps.drain()
                return
            self.step()
        raise AssertionError("a sequence never ends")

    def check_rest(self):
        assert not self.device.faults, self.device.faults[:3]
        assert not self.runner.in_flight and self.device.is_idle
        assert self.scheduler._preempted.num_pages == 0 and self.kv.num_in_use == 0
        for sequence, reported in self.records.tokens.items():
            assert reported == sequence.token_ids[sequence.num_prompt_tokens :]
            assert PENDING_TOKEN not in reported
        self.kv.check_integrity()
