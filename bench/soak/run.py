"""Runs a soak: load on a server process, samples of its memory meanwhile, and idle states around.

The load pauses once, after a short warm-up. Open files and threads must be at the end what they
were in that pause, and nothing may be running. Slopes are fitted over the samples of the second
half of the time, in which the caches, by the sizes that /metrics reports, should be full. Where
they are not, or where the intervals are too wide, there is no verdict.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from bench.soak.calls import KEYS, Calls
from bench.soak.server import TRACEBACK, ServerProcess
from bench.soak.slope import Slope, floor_of, full_at_s, medians_of, slope_of, step_of
from bench.soak.streams import Outcomes, Streams
from bench.soak.usage import Usage, read_usage
from serve.errors import ConfigError, MergestepError

_WARM_SHARE, _WARM_S = 0.1, 60.0  # of the time, at most
_SAMPLE_S, _LEAST_SAMPLES = 1.0, 40
_IDLE_S = 3.0  # the server gives unused memory back after half a second without work
_IDLE_TRIES = 10
_FIT_FROM = 0.5  # of the time: the heap grows a little for a while after the caches are full
_CACHE_BYTES = 1 << 20  # smaller ones do not delay the fit
_LATE_THREADS = 6  # a pool starts a thread when it first needs it; asyncio's has two cores + 4
_CLEAR = 5.0  # times the limit, which the interval must not reach
MEGABYTE, HOUR_S = 1e6, 3600.0
_LEAST_ANSWERED = 0.5  # of the valid calls that their client waits for
UNFINISHED = "requests_unfinished"
ZERO_WHEN_IDLE = UNFINISHED, "kv_pages in_use", "charged_bytes"


SERVER, WORKERS = "server, without the K/V pool", "its child processes"
Value = Callable[[Usage], float]
JUDGED: dict[str, Value] = {
    SERVER: lambda usage: usage.own_bytes,
    WORKERS: lambda usage: usage.memory["workers"],
}
"""What must not grow."""


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """minutes: of load. abort_share, hostile_share: of the calls. max_slope: the most growth that
    is no fault, in MB per hour. Raises ConfigError."""

    minutes: float = 60.0
    streams: int = 64
    abort_share: float = 0.3
    hostile_share: float = 0.1
    max_slope: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.minutes > 0 and self.streams > 0):
            raise ConfigError("minutes and streams must be positive")
        for name in ("abort_share", "hostile_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be between 0 and 1, not {getattr(self, name)}")

    @property
    def sample_s(self) -> float:
        """Seconds between two samples."""
        return min(_SAMPLE_S, 60 * self.minutes / _LEAST_SAMPLES)


@dataclass(slots=True)
class Soak:
    """The results. before, after: the idle server after the warm-up and at the end."""

    settings: SoakSettings
    before: Usage
    after: Usage
    samples: list[Usage]
    outcomes: Outcomes
    log: str = ""
    filled_s: dict[str, float] = field(default_factory=dict)
    fit_from_s: float = 0.0

    def __post_init__(self) -> None:
        """Finds out when each cache was full, and where the fit begins."""
        names = self.samples[-1].kept if self.samples else {}
        for name in names:
            sizes = [(usage.at_s, usage.kept.get(name, 0.0)) for usage in self.samples]
            if max(value for _, value in sizes) >= _CACHE_BYTES:
                self.filled_s[name] = full_at_s(sizes)
        self.fit_from_s = self.samples[-1].at_s * _FIT_FROM if self.samples else 0.0

    def series(self, value: Value) -> list[tuple[float, float]]:
        """Returns (seconds, value) of the samples from the fit's begin on."""
        later = (usage for usage in self.samples if usage.at_s >= self.fit_from_s)
        return [(usage.at_s, value(usage)) for usage in later]

    def slope(self, value: Value) -> Slope | None:
        """Returns the growth of a figure per hour in the second half of the time: that of its
        floor or of its median, whichever is known better."""
        points = self.series(value)
        found = [slope_of(floor_of(points)), slope_of(medians_of(points))]
        slopes = [slope * HOUR_S for slope in found if slope is not None]
        return min(slopes, key=lambda slope: slope.high - slope.low, default=None)

    @property
    def still_filling(self) -> list[str]:
        """The caches that were not full when the fit began."""
        return [name for name, at_s in self.filled_s.items() if at_s > self.fit_from_s]

    def faults(self) -> list[str]:
        """Returns a text for each figure that shows a leak or an error."""
        texts = [f"a call failed: {text}" for text in self.outcomes.failures[:3]]
        limit = self.settings.max_slope
        for name, slope in self._judged():
            if _is_growth(slope, limit):
                texts.append(f"{name}: memory grows by {slope.value:.2f} MB/h, more than {limit:g}")
        files, files_before = self.after.own_files, self.before.own_files
        if files > files_before:
            texts.append(f"the server has {files} files, {files_before} before")
        early = max(usage.threads for usage in self.samples[: len(self.samples) // 2 + 1])
        if self.after.threads > early + _LATE_THREADS:
            texts.append(f"the server has {self.after.threads} threads, {early} in the first half")
        if self.outcomes.answered < _LEAST_ANSWERED:
            share = f"{100 * self.outcomes.answered:.0f} %"
            texts.append(f"only {share} of the valid calls were answered")
        for name in ZERO_WHEN_IDLE:
            if self.after.metrics.get(name):
                texts.append(f"{name} is {self.after.metrics[name]:g} in the idle server")
        if TRACEBACK in self.log:
            texts.append("the server's log has a traceback")
        return texts

    def undecided(self) -> list[str]:
        """Returns a text for each reason why the samples do not show whether there is a leak."""
        limit = self.settings.max_slope
        texts = [f"{name} was not full when the fit began" for name in self.still_filling]
        judged = self._judged()
        if not judged:
            texts.append("too few samples for a slope")
        for name, slope in judged:
            is_wide = slope.value > limit or slope.high > _CLEAR * limit
            if is_wide and not _is_growth(slope, limit):
                texts.append(f"{name}: the interval reaches {slope.high:.2f} MB/h")
        for name, value in JUDGED.items():
            at_s, rise = step_of(floor_of(self.series(value)))
            if rise > limit * MEGABYTE and not any(name in text for text in self.faults()):
                rose = f"memory rose by {rise / MEGABYTE:.1f} MB after minute {at_s / 60:.1f}"
                texts.append(f"{name}: {rose} and stayed there")
        return [f"{text}: run longer" for text in texts]

    def _judged(self) -> list[tuple[str, Slope]]:
        """Returns the slopes of JUDGED in MB per hour."""
        slopes = [(name, self.slope(value)) for name, value in JUDGED.items()]
        return [(name, slope * (1 / MEGABYTE)) for name, slope in slopes if slope is not None]


def _is_growth(slope: Slope, limit: float) -> bool:
    """Returns whether a slope is above the limit and is certainly one."""
    return slope.value > limit and slope.low > 0


class SoakTest:
    """One soak on a running server. report: is called with each sample and the outcomes so far."""

    def __init__(
        self,
        server: ServerProcess,
        settings: SoakSettings,
        report: Callable[[Usage, Outcomes], None],
    ) -> None:
        self._server = server
        self._settings = settings
        self._report = report
        self._began_s = time.monotonic()
        self._samples: list[Usage] = []
        key = random.Random(settings.seed).choice(KEYS).partition(":")[2]
        self._headers = {"Authorization": f"Bearer {key}"}

    async def run(self) -> Soak:
        settings, url = self._settings, self._server.url
        async with aiohttp.ClientSession(headers=self._headers) as session:
            async with session.get(f"{url}/v1/models") as response:
                model = (await response.json())["data"][0]
            longest = int(model.get("max_model_len") or 1024)
            calls = Calls(model["id"], longest, settings.seed, settings.hostile_share)
            streams = Streams(
                url,
                calls,
                num=settings.streams,
                abort_share=settings.abort_share,
                seed=settings.seed,
            )
            seconds = 60 * settings.minutes
            warm_s = min(_WARM_S, _WARM_SHARE * seconds)
            await self._load(session, streams, warm_s)
            before = await self._idle(session)
            await self._load(session, streams, seconds - warm_s)
            after = await self._idle(session)
        return Soak(
            settings, before, after, self._samples, streams.outcomes, self._server.log_text()
        )

    async def _load(self, session: aiohttp.ClientSession, streams: Streams, seconds: float) -> None:
        """Runs the streams for some seconds and takes samples. Raises MergestepError if the server
        ends."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        load = asyncio.create_task(streams.run())
        try:
            while (left_s := until_s - loop.time()) > 0:
                await asyncio.wait((load,), timeout=min(self._settings.sample_s, left_s))
                if load.done():
                    load.result()
                sample = await self._sample(session)
                self._samples.append(sample)
                self._report(sample, streams.outcomes)
        finally:
            load.cancel()
            with suppress(asyncio.CancelledError):
                await load

    async def _idle(self, session: aiohttp.ClientSession) -> Usage:
        """Returns the usage when nothing runs any more."""
        for _ in range(_IDLE_TRIES):
            await asyncio.sleep(_IDLE_S)
            usage = await self._sample(session)
            if not usage.metrics.get(UNFINISHED):
                break
        return usage

    async def _sample(self, session: aiohttp.ClientSession) -> Usage:
        try:
            async with session.get(f"{self._server.url}/metrics") as response:
                text = await response.text()
            return read_usage(self._server.pid, time.monotonic() - self._began_s, text)
        except (aiohttp.ClientError, OSError) as error:
            tail = self._server.log_text()
            raise MergestepError(f"the server has ended: {error!r}\n{tail}") from error
