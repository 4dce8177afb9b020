"""The setting `kv_policy`: NAME:budget=AMOUNT, such as quest:budget=12% or h2o:budget=1024.

A share of a short sequence would be a few tokens, and its answer would fall apart, so a share is at
least LEAST_TOKENS; `quest:budget=12%,least=32` says another number. A number of tokens below
FEWEST_TOKENS is probably a share whose % is missing: `quest:budget=32,least=1` says that it is not.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TypedDict

SELECTIONS = ("quest",)
EVICTIONS = ("window", "h2o", "snapkv", "keyformer", "pyramid")
POLICIES = (*SELECTIONS, *EVICTIONS)
OFF = "off"
LEAST_TOKENS = 128  # of a share
FEWEST_TOKENS = 64  # of a number of tokens
MAX_CHARS = 64  # of the setting
# int and float would also read "1_0", "+25", blanks and digits of other scripts
_BUDGET = re.compile(r"([0-9]+|[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?%)(,least=[0-9]+)?")


@dataclass(frozen=True, slots=True)
class KVPolicy:
    """A policy and its budget. One of tokens and share is None.

    tokens: the tokens of a sequence that are read or kept, at least 1. share: their share of the
    sequence, above 0 and at most 1. least: the tokens that a share is at least.
    """

    name: str
    tokens: int | None = None
    share: float | None = None
    least: int = 1

    @property
    def evicts(self) -> bool:
        """Whether K/V is dropped; otherwise all of it is kept and a part of it is read."""
        return self.name in EVICTIONS

    @property
    def shrinks(self) -> bool:
        """Whether upper layers keep less than lower ones."""
        return self.name == "pyramid"

    @property
    def selects(self) -> bool:
        """Whether all K/V is kept, and a part of it is read."""
        return self.name in SELECTIONS

    @property
    def key(self) -> str:
        """A text that differs between policies."""
        return f"{self.name}:{self.tokens}:{self.share!r}:{self.least}"

    @property
    def amount(self) -> str:
        """The budget in words."""
        return f"{self.tokens} tokens" if self.share is None else f"{100 * self.share:g} %"

    @property
    def setting(self) -> str:
        """The setting that gives this policy, such as h2o:budget=25%."""
        if self.share is None:
            least = ",least=1" if (self.tokens or 0) < FEWEST_TOKENS else ""
            return f"{self.name}:budget={self.tokens}{least}"
        least = "" if self.least == LEAST_TOKENS else f",least={self.least}"
        return f"{self.name}:budget={100 * self.share:.15g}%{least}"

    def budget(self, num_tokens: int) -> int:
        """Returns how many tokens of a sequence of num_tokens are read or kept, at least 1; they
        may be more than there are."""
        if self.share is None:
            assert self.tokens is not None
            return self.tokens
        return max(self.least, math.ceil(num_tokens * self.share))


def parse_kv_policy(text: object) -> KVPolicy | None:
    """Returns the policy; None for "off". ValueError says what is wrong, without the setting's
    name."""
    if not isinstance(text, str):
        raise ValueError(f"must be {OFF} or NAME:budget=AMOUNT, not {text!r}")
    if len(text) > MAX_CHARS:
        raise ValueError(f"is longer than {MAX_CHARS} characters")
    if text == OFF:
        return None
    name, _, rest = text.partition(":")
    if name not in POLICIES:
        raise ValueError(f"must be {OFF} or one of {', '.join(POLICIES)}, not {name!r}")
    key, _, amount = rest.partition("=")
    if key != "budget":
        raise ValueError(f"needs a budget, such as {name}:budget=25%, not {text!r}")
    try:
        budget = parse_budget(amount)
    except ValueError:
        raise ValueError(
            "must have a budget of at least one token, or above 0% and at most 100%, with perhaps"
            f" least=TOKENS, not {amount!r}"
        ) from None
    if "share" not in budget and budget["tokens"] < budget.pop("least", FEWEST_TOKENS):
        raise ValueError(_too_few(name, amount))
    return KVPolicy(name, **budget)


def _too_few(name: str, amount: str) -> str:
    tokens, given, _ = amount.partition(",")
    if given:
        return f"must have a budget of at least as many tokens as least= says, not {amount!r}"
    return (
        f"has a budget of {tokens} tokens: did you mean {name}:budget={tokens}%? For so few tokens"
        f" say {name}:budget={tokens},least=1"
    )


@lru_cache(maxsize=256)
def policy_of_request(text: str) -> KVPolicy | None:
    """Returns the policy that a request names; None for "off". ValueError, as parse_kv_policy. The
    same text is asked for in each step of a request."""
    return parse_kv_policy(text)


class Budget(TypedDict, total=False):
    """The fields of KVPolicy that a budget sets."""

    tokens: int
    share: float
    least: int


def parse_budget(text: str) -> Budget:
    """Parses "1024", "12%" or "12%,least=32"; "32,least=1", too. ValueError."""
    if _BUDGET.fullmatch(text) is None:
        raise ValueError(text)
    amount, _, tokens = text.partition(",least=")
    least = _positive(tokens) if tokens else None
    if not amount.endswith("%"):
        found: Budget = {"tokens": _positive(amount)}
        return found if least is None else {**found, "least": least}
    share = float(amount[:-1]) / 100
    if not 0 < share <= 1:
        raise ValueError(text)
    return {"share": share, "least": LEAST_TOKENS if least is None else least}


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)
