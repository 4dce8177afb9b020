"""Settings of a simulated engine: those of EngineConfig, and those that its machine and model
determine."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.simulate.memory import make_kv
from memory.kv_manager import KVManager
from memory.pages.layer_groups import LayerGroup
from memory.prefix.index import PrefixHasher
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.scheduler.admission import make_policy
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.waiting_queue import make_queue


@dataclass(frozen=True, slots=True)
class PoolDelays:
    """Delays in seconds that a client has beside the steps. tokenize_s for each prompt and
    tokenize_token_s for each of its tokens pass before the loop gets the request. output_s passes
    from a step's end until the client has its tokens."""

    tokenize_s: float = 0.0
    tokenize_token_s: float = 0.0
    output_s: float = 0.0

    def before(self, num_prompt: int) -> float:
        return self.tokenize_s + num_prompt * self.tokenize_token_s


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """The settings of a simulation. engine must have max_model_len, kv_cache_bytes and
    kv_page_bytes. groups describe the K/V of the layers (memory.pages.layer_groups). map_call_s are
    the seconds of a system call that maps pages, against which prefix hits are weighed. Raises
    ConfigError if one of engine's three sizes is missing."""

    engine: EngineConfig
    groups: tuple[LayerGroup, ...]
    delays: PoolDelays = field(default_factory=PoolDelays)
    map_call_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_model_len", "kv_cache_bytes", "kv_page_bytes"):
            if getattr(self.engine, name) is None:
                raise ConfigError(f"a simulation needs {name}")

    @property
    def max_model_len(self) -> int:
        assert self.engine.max_model_len is not None, "checked"
        return self.engine.max_model_len

    def make_kv(self) -> KVManager:
        """Returns a K/V manager. Raises ConfigError if memory does not hold one whole context."""
        engine = self.engine
        assert engine.kv_cache_bytes is not None and engine.kv_page_bytes is not None, "checked"
        kv = make_kv(
            self.groups,
            page_bytes=engine.kv_page_bytes,
            num_pages=engine.kv_cache_bytes // engine.kv_page_bytes,
            num_ranges=engine.max_num_seqs,
            max_model_len=self.max_model_len,
            max_rows=engine.chunk_tokens,
            map_call_s=self.map_call_s,
        )
        if kv.pages_for(self.max_model_len) > kv.num_pages:
            raise ConfigError(
                f"kv_cache_bytes {engine.kv_cache_bytes} holds less than one sequence of"
                f" max_model_len {self.max_model_len}: raise kv_cache_bytes or lower max_model_len"
            )
        return kv

    def make_scheduler(self, *, has_prefixes: bool) -> Scheduler:
        """Returns a scheduler as serve/engine/loader.py makes it. Without has_prefixes it has no
        prefix cache."""
        engine, kv = self.engine, self.make_kv()
        has_cache = engine.prefix_cache and has_prefixes
        # a simulated model has neither words nor hidden states, so past answers predict
        predictor = engine.length_predictor
        return Scheduler(
            SchedulerLimits.of(engine),
            kv,
            make_policy(
                engine.memory_policy,
                kv,
                engine.batched_tokens,
                None if isinstance(predictor, str) else predictor,
            ),
            PrefixHasher(kv.page_end, b"simulation") if has_cache else None,
            make_queue(engine.order),
        )
