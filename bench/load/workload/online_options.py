"""The settings of a load test. bench/cli/main.py makes the options of `serve bench` from them.

The module imports nothing heavy by itself, so that the help is quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.errors import ConfigError

if TYPE_CHECKING:
    from bench.load.workload.datasets import DatasetSettings
    from bench.load.workload.offered_load import LoadOptions

DEFAULT_CANCEL_CHUNKS = 3


@dataclass(frozen=True, slots=True)
class OnlineOptions:
    """The options, which bench/common/cli_options.py describes.

    engine holds EngineConfig's settings for an engine in this process or a simulated one. Raises
    ConfigError for options that exclude each other."""

    model: str
    revision: str | None = None
    qps: str | None = None
    arrival: str = "poisson"
    requests: int | None = None
    duration: float | None = None
    speedup: float | None = None
    seed: int = 0
    seeds: int = 1
    warmup: int = 4
    warmup_s: float = 0.0
    grace_s: float | None = None
    max_concurrency: int | None = None
    cancel_rate: float = 0.0
    cancel_after_s: float | None = None
    cancel_after_chunks: int | None = None
    probe_qps: float = 0.0
    processes: int | None = None
    dataset: str | None = None
    input_len: str | None = None
    output_len: str | None = None
    trace_start: float = 0.0
    trace_end: float | None = None
    block_size: int = 512
    num_groups: int = 8
    prefix_len: int = 512
    num_turns: int = 4
    as_text: bool = False
    url: str | None = None
    in_process: bool = False
    simulate: bool = False
    machine: str | None = None
    server_model: str | None = None
    api_key_file: Path | None = None
    header: list[str] | None = None
    timeout: float | None = None
    slo: str | None = None
    slo_from: str = "schedule"
    find_max_qps: bool = False
    attainment: float = 0.99
    resolution: float = 0.05
    json_file: Path | None = None
    jsonl_file: Path | None = None
    html_file: Path | None = None
    png_file: Path | None = None
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if sum((self.url is not None, self.in_process, self.simulate)) > 1:
            raise ConfigError("give only one of url, in_process and simulate")
        for name in ("machine",) if not self.simulate else ():
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} goes with simulate")
        for name in ("server_model", "api_key_file", "header", "timeout"):
            if getattr(self, name) is not None and self.url is None:
                raise ConfigError(f"{name} goes with url")
        if self.revision is not None and (self.url is not None or self.simulate):
            raise ConfigError("revision goes with a model that is loaded here")
        if self.seeds < 1:
            raise ConfigError(f"seeds must be at least 1, not {self.seeds}")
        if self.warmup < 0:
            raise ConfigError(f"warmup must not be negative, not {self.warmup}")
        if self.find_max_qps and self.slo is None:
            raise ConfigError("find_max_qps needs an slo")
        if self.slo_from not in ("schedule", "send"):
            raise ConfigError(f"slo_from must be schedule or send, not {self.slo_from!r}")

    @property
    def rates(self) -> list[float | None]:
        """The rates to offer; None is the arrivals' own rate."""
        from bench.load.workload.arrivals import parse_arrival, parse_qps

        if self.qps is None and parse_arrival(self.arrival)[0] in ("ramp", "trace", "inf"):
            return [None]
        return [*parse_qps("1" if self.qps is None else self.qps)]

    @property
    def dataset_settings(self) -> DatasetSettings:
        from bench.load.workload.datasets import DatasetSettings

        name = self.dataset or ("mixed" if self.input_len is None else "random")
        return DatasetSettings(
            name=name,
            input_len=self.input_len,
            output_len=self.output_len,
            max_model_len=self.engine.get("max_model_len"),
            start_s=self.trace_start,
            end_s=math.inf if self.trace_end is None else self.trace_end,
            block_size=self.block_size,
            num_groups=self.num_groups,
            prefix_len=self.prefix_len,
            num_turns=self.num_turns,
            as_text=self.as_text,
        )

    def load_options(self, seed: int) -> LoadOptions:
        from bench.load.workload.offered_load import LoadOptions

        chunks = self.cancel_after_chunks
        if self.cancel_rate and chunks is None and self.cancel_after_s is None:
            chunks = DEFAULT_CANCEL_CHUNKS
        return LoadOptions(
            seed=seed,
            warmup_s=self.warmup_s,
            grace_s=self.grace_s,
            max_concurrency=self.max_concurrency,
            cancel_rate=self.cancel_rate,
            cancel_after_s=self.cancel_after_s,
            cancel_after_chunks=chunks,
            probe_qps=self.probe_qps,
            processes=self.processes,
        )
