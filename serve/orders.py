"""All orders, by name."""

from __future__ import annotations

from serve.config import ORDERS as ORDERS
from serve.order import Order, Priority
from serve.order_fair import Fair
from serve.order_mlfq import MultiLevelFeedback


def make_order(name: str) -> Order:
    """One of ORDERS (config.py checks the name)."""
    made = {"fcfs": Order, "priority": Priority, "mlfq": MultiLevelFeedback, "fair": Fair}
    return made[name]()
