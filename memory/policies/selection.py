"""Selection: all K/V is kept, and each decoded token reads the tiles that may matter most to it."""

from __future__ import annotations

from collections.abc import Sequence

from memory.policies.setting import SELECTIONS, KVPolicy


class Selection:
    """How many tiles each decoded token reads, and how many were read and could have been.

    num_read, num_held: tiles, the sum over all decoded rows so far. One thread plans steps; any
    thread may read the counts.
    """

    def __init__(self, policy: KVPolicy) -> None:
        assert policy.name in SELECTIONS, f"{policy.name} selects nothing"
        self.policy = policy
        self.num_read = 0
        self.num_held = 0

    def counts(self) -> dict[str, int]:
        """Returns the tiles that were read and held, by these names."""
        return {"read": self.num_read, "held": self.num_held}

    def plan(
        self,
        num_rows: Sequence[int],
        kv_lens: Sequence[int],
        prompt_lens: Sequence[int],
        tile_tokens: int,
        policies: Sequence[KVPolicy | None] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Returns how many of each sequence's last rows read a part of their tiles, and for each of
        these rows the number of tiles, at least 1; its own tile is one of them. The rows of a
        prompt read everything. num_rows, kv_lens, prompt_lens, policies: as in AttentionStep."""
        counts: list[int] = []
        budgets: list[int] = []
        own = [None] * len(num_rows) if policies is None else policies
        for rows, kv_len, prompt_len, of in zip(num_rows, kv_lens, prompt_lens, own, strict=True):
            policy = self.policy if of is None else of
            first = max(kv_len - rows, prompt_len)
            counts.append(max(0, kv_len - first))
            for length in range(first + 1, kv_len + 1):
                held = -(-length // tile_tokens)
                read = min(held, -(-policy.budget(length) // tile_tokens))
                self.num_held += held
                self.num_read += read
                budgets.append(read)
        return counts, budgets


def selection_of(policy: KVPolicy | None) -> Selection | None:
    """Returns the selection of a policy; None for a policy that evicts, and for none."""
    return Selection(policy) if policy is not None and policy.name in SELECTIONS else None
