"""Steps that are all alike: for who simulates, and does not want to ask the scheduler each time.

While nobody waits and everybody who runs only decodes, the scheduler's next decisions are known:
the same rows again, until somebody needs a page, has one complete, or ends. Integers only: no
torch, no asyncio.
"""

from __future__ import annotations

from serve.plan import StepPlan
from serve.scheduler import Scheduler


def num_alike(scheduler: Scheduler, plan: StepPlan) -> int:
    """After the plan's update: how many of the next steps have its very rows and change nothing
    but the numbers of tokens, as long as nothing arrives and no stop token comes."""
    running = scheduler.running
    is_all = plan.num_decodes == len(plan.sequences) == len(running)
    if not is_all or scheduler.waiting or any(s.is_finished for s in plan.sequences):
        return 0
    # with the last of them nothing is due yet
    return max(0, min([s.steady_until - s.num_computed_tokens for s in running]) - 1)


def begin_alike(scheduler: Scheduler, now_s: float) -> None:
    """One of them begins: what schedule() counts."""
    scheduler.waiting.tick(now_s)
    scheduler.num_steps += 1
    scheduler.num_page_steps += scheduler.kv.num_in_use


def end_alike(plan: StepPlan, num_steps: int, token: int) -> None:
    """So many of them ran: each sequence has that many more tokens."""
    tokens = [token] * num_steps
    for sequence in plan.sequences:
        sequence.num_computed_tokens += num_steps
        sequence.token_ids += tokens
