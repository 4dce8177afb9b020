"""Pool 3: one thread that turns what the steps brought into deltas, beside the device."""

from __future__ import annotations

import queue
import threading
from time import monotonic

from serve.engine.output_processor import OutputProcessor, StepRecord

# Steps that the thread may be behind before the loop waits for it.
_MAX_RECORDS_BEHIND = 8


class OutputThread:
    """Records wait here until the next step is under way (`flush`): the thread then works beside
    the device and not between two steps. All but `is_alive`, `num_waiting` and
    `busy_s` (seconds of work) is the loop's."""

    def __init__(self, processor: OutputProcessor) -> None:
        self._processor = processor
        self.busy_s = 0.0
        self._pending: list[StepRecord] = []
        self._records: queue.Queue[StepRecord | None] = queue.Queue(_MAX_RECORDS_BEHIND)
        self._thread = threading.Thread(target=self._run, name="mergestep-output", daemon=True)
        self.add = self._pending.append
        self.start = self._thread.start
        self.is_alive = self._thread.is_alive

    def flush(self) -> None:
        """Hand over what has been added."""
        for record in self._pending:
            self._records.put(record)
        self._pending.clear()

    @property
    def num_waiting(self) -> int:
        """Steps that are not processed yet. Any thread."""
        return len(self._pending) + self._records.qsize()

    def stop(self) -> None:
        """When all that was handed over is processed."""
        self._records.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            began_s = monotonic()
            self._processor.process(record)
            self.busy_s += monotonic() - began_s
