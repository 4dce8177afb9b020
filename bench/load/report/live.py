"""Shows a run in progress as a small panel on a terminal."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bench.common.percentiles import tail
from bench.load.client.record import Progress

BARS = "▁▂▃▄▅▆▇█"
SPAN_S = 10.0  # seconds over which percentiles are taken
RATE_SPAN_S = 2.0
WIDTH = 40


class LiveView:
    """The panel, used as `with LiveView(...) as view:`. It shows only on a terminal.

    total is the number of requests, qps the offered rate, title the name of the target.
    """

    def __init__(
        self,
        console: Console,
        *,
        total: int,
        qps: float,
        title: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._total, self._qps, self._clock = title, total, qps, clock
        self._start_s = clock()
        self._ttfts: deque[tuple[float, float]] = deque()
        self._points: deque[tuple[float, Progress]] = deque()
        self._speeds: deque[float] = deque(maxlen=WIDTH)
        self._last_speed_s = -math.inf
        self._live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, progress: Progress) -> None:
        if self._live is None:
            return
        now_s = self._clock()
        self._points.append((now_s, progress))
        while len(self._points) > 2 and self._points[1][0] <= now_s - RATE_SPAN_S:
            self._points.popleft()
        self._ttfts.extend((now_s, ttft_s) for ttft_s in progress.ttfts_s)
        while self._ttfts and self._ttfts[0][0] < now_s - SPAN_S:
            self._ttfts.popleft()
        if now_s - self._last_speed_s >= 0.5:
            self._last_speed_s = now_s
            self._speeds.append(self._rate("num_tokens"))
        self._live.update(self._draw(now_s, progress), refresh=True)

    def _rate(self, name: str) -> float:
        (from_s, first), (to_s, last) = self._points[0], self._points[-1]
        change = getattr(last, name) - getattr(first, name)
        return change / (to_s - from_s) if to_s > from_s else 0.0

    def _draw(self, now_s: float, progress: Progress) -> Group:
        table = Table.grid(padding=(0, 2))
        for _ in range(4):
            table.add_column(justify="right")
        offered = "all at once" if math.isinf(self._qps) else f"{self._qps:g}/s"
        failed = Text(str(progress.num_failed), style="bold red" if progress.num_failed else "")
        table.add_row("offered", offered, "sent", f"{progress.num_sent} of {self._total}")
        table.add_row(
            "sending", f"{self._rate('num_sent'):.1f}/s", "running", str(progress.num_running)
        )
        table.add_row(
            "answering", f"{self._rate('num_done'):.1f}/s", "done", str(progress.num_done)
        )
        table.add_row("output", f"{self._rate('num_tokens'):.0f} tokens/s", "failed", failed)
        ttfts = [1000 * ttft_s for _, ttft_s in self._ttfts]
        if ttfts:
            high = tail(ttfts)
            table.add_row("TTFT p50", f"{median(ttfts):.0f} ms", high.label, f"{high.value:.0f} ms")
        head = Text.assemble((self._title, "bold"), f"  {now_s - self._start_s:.0f} s")
        bar = ProgressBar(total=max(self._total, 1), completed=progress.num_done, width=WIDTH)
        spark = Text.assemble("tokens/s  ", (sparkline(self._speeds), "cyan"))
        return Group(head, bar, table, spark)


def sparkline(values: Sequence[float]) -> str:
    """Returns one character per value, whose height is the value's share of the largest."""
    top = max(values, default=0.0)
    if top <= 0:
        return BARS[0] * len(values)
    return "".join(BARS[min(int(value / top * len(BARS)), len(BARS) - 1)] for value in values)
