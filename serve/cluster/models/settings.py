"""Settings of several models at one address."""

from __future__ import annotations

import math
from dataclasses import dataclass

from serve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelsSettings:
    """Settings that matter only where several models are served.

    more_models: the models beside the first. idle_seconds: a model without requests is put to sleep
    after this; infinity: only when another needs its memory. memory_budget: the bytes that all
    models together may take; None: 80 % of the memory that is free at the start. model_wait_s: how
    long a request waits for its model. max_model_waiting: the most requests that wait for models.
    """

    more_models: tuple[str, ...] = ()
    idle_seconds: float = 300.0
    memory_budget: int | None = None
    model_wait_s: float = 300.0
    max_model_waiting: int = 1024

    def __post_init__(self) -> None:
        if not self.idle_seconds > 0:
            raise ConfigError(f"idle_seconds must be positive, not {self.idle_seconds}")
        if not 0 < self.model_wait_s < math.inf:
            raise ConfigError(
                f"model_wait_s must be a positive number of seconds, not {self.model_wait_s}"
            )
        if self.memory_budget is not None and self.memory_budget < 1:
            raise ConfigError(f"memory_budget must be positive, not {self.memory_budget}")
        if self.max_model_waiting < 1:
            raise ConfigError(f"max_model_waiting must be positive, not {self.max_model_waiting}")
