"""The setting `kv_policy`: NAME:budget=AMOUNT, such as quest:budget=12% or h2o:budget=1024."""

from __future__ import annotations

import math
from dataclasses import dataclass

SELECTIONS = ("quest",)
EVICTIONS = ("window", "h2o", "snapkv", "keyformer", "pyramid")
POLICIES = (*SELECTIONS, *EVICTIONS)
OFF = "off"
_EXAMPLE = "such as quest:budget=12% or h2o:budget=1024"


@dataclass(frozen=True, slots=True)
class KVPolicy:
    """A policy and its budget. One of tokens and share is None.

    tokens: the tokens of a sequence that are read or kept, at least 1. share: their share of the
    sequence, above 0 and at most 1.
    """

    name: str
    tokens: int | None = None
    share: float | None = None

    @property
    def evicts(self) -> bool:
        """Whether K/V is dropped; otherwise all of it is kept and a part of it is read."""
        return self.name in EVICTIONS

    @property
    def amount(self) -> str:
        """The budget in words."""
        return f"{self.tokens} tokens" if self.share is None else f"{100 * self.share:g} %"

    def budget(self, num_tokens: int) -> int:
        """Returns how many tokens of a sequence of num_tokens are read or kept, at least 1."""
        if self.share is None:
            assert self.tokens is not None
            return self.tokens
        return max(1, math.ceil(num_tokens * self.share))


def parse_kv_policy(text: object) -> KVPolicy | None:
    """Returns the policy; None for "off". ValueError says what is wrong, without the setting's
    name."""
    if not isinstance(text, str):
        raise ValueError(f"must be {OFF} or NAME:budget=AMOUNT, not {text!r}")
    if text == OFF:
        return None
    name, _, rest = text.partition(":")
    if name not in POLICIES:
        raise ValueError(f"must be {OFF} or one of {', '.join(POLICIES)}, not {name!r}")
    key, _, amount = rest.partition("=")
    if key != "budget":
        raise ValueError(f"needs a budget, {_EXAMPLE}, not {text!r}")
    try:
        if amount.endswith("%"):
            share = float(amount[:-1]) / 100
            if 0 < share <= 1:
                return KVPolicy(name, share=share)
        elif int(amount) > 0:
            return KVPolicy(name, tokens=int(amount))
    except ValueError:
        pass
    raise ValueError(
        f"must have a budget of at least one token or above 0% and at most 100%, not {amount!r}"
    )
