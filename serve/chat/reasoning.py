"""How much a model may reason: from effort, switch and bound to the template and the sampler.

A template that knows an option gets it as a variable. What it does not know becomes a bound in
tokens, which the sampler keeps (serve/structured/reasoning_limit.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve.errors import RequestError
from serve.parameter_checks import check_int
from serve.sampling_params import SEED_LIMIT, UNBOUNDED

BUDGET = "thinking_token_budget"
# The most tokens of reasoning by effort, for models whose template knows no effort. A higher one
# has no bound.
EFFORT_TOKENS = {"none": 0, "minimal": 512, "low": 2048, "medium": 8192, "high": 24576}
EFFORTS = (*EFFORT_TOKENS, "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking")  # names of the templates' switch
_TEMPLATE_BUDGET = "thinking_budget"


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """What a request says. effort: one of EFFORTS. max_tokens: the bound; UNBOUNDED for none.
    is_enabled: whether to reason at all. param: the field that max_tokens comes from, if a model
    whose reasoning cannot be bounded has to refuse it."""

    effort: str | None = None
    max_tokens: int | None = None
    is_enabled: bool | None = None
    param: str | None = None


NO_OPTIONS = ReasoningOptions()


class ReasoningPlan(NamedTuple):
    """What follows for one model. template_kwargs: all variables of the template. max_tokens: the
    sampler's bound."""

    template_kwargs: dict[str, Any]
    max_tokens: int | None


def plan_reasoning(
    options: ReasoningOptions,
    given: Mapping[str, Any],
    template: str,
    default: int | None,
) -> ReasoningPlan:
    """Returns what follows from the options. given: the caller's own variables of the template,
    which go first. template: its text. default: the bound of requests that say nothing. Raises
    RequestError for a thinking_budget in `given` that is no number of tokens."""
    budget, effort = options.max_tokens, options.effort
    if given.get(_TEMPLATE_BUDGET) is not None:
        where = f"chat_template_kwargs.{_TEMPLATE_BUDGET}"
        check_int(where, given[_TEMPLATE_BUDGET], UNBOUNDED, SEED_LIMIT)
        budget = given[_TEMPLATE_BUDGET] if budget is None else budget
    switch = next((given[name] for name in SWITCHES if given.get(name) is not None), None)
    enabled = options.is_enabled if switch is None else bool(switch)
    if enabled is None and (effort == "none" or budget == 0):
        enabled = False
    kwargs: dict[str, Any] = {}
    if effort is not None:
        kwargs["reasoning_effort"] = effort
    if enabled is not None:
        kwargs["enable_thinking"] = enabled
        if not _knows(template, "enable_thinking") and _knows(template, "thinking"):
            kwargs["thinking"] = enabled
    if budget is not None and budget >= 0 and _knows(template, _TEMPLATE_BUDGET):
        kwargs[_TEMPLATE_BUDGET] = budget
    bound = default
    if enabled is False:
        bound = 0
    elif budget is not None:
        bound = budget
    elif effort is not None and not _knows(template, "reasoning_effort"):
        bound = EFFORT_TOKENS.get(effort)
    if bound is not None and bound < 0:
        bound = None
    return ReasoningPlan({**kwargs, **given}, bound)


def check_effort(effort: object, where: str) -> None:
    """Raises RequestError unless the effort is None or one of EFFORTS."""
    if effort is not None and effort not in EFFORTS:
        raise RequestError(f"{where} must be one of {', '.join(EFFORTS)}", param=where)


def _knows(template: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", template) is not None
