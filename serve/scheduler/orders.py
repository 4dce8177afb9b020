"""All orders, by name."""

from __future__ import annotations

from serve.config import ORDERS as ORDERS
from serve.scheduler.fair_queue import Fair
from serve.scheduler.mlfq_queue import MultiLevelFeedback
from serve.scheduler.waiting_queue import Priority, WaitingQueue


def make_queue(name: str) -> WaitingQueue:
    """One of ORDERS (config.py checks the name)."""
    made = {"fcfs": WaitingQueue, "priority": Priority, "mlfq": MultiLevelFeedback, "fair": Fair}
    return made[name]()
