"""The fields that say how much a model may reason: OpenAI's, vLLM's, llama.cpp's and Qwen's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve.chat.reasoning import BUDGET, EFFORTS, ReasoningOptions
from serve.errors import RequestError
from serve.http.schema.fields import Boolean, FieldType, Integer, OneOfNames
from serve.sampling_params import UNBOUNDED

MAX_BUDGET = (1 << 31) - 1
BUDGET_FIELD = Integer(UNBOUNDED, MAX_BUDGET)
# Other servers' names of the bound, beside vLLM's, which is a field of SamplingParams.
OTHER_BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_budget")
REASONING_FIELDS: dict[str, FieldType] = {
    "reasoning_effort": OneOfNames(EFFORTS),
    "enable_thinking": Boolean(),
    **dict.fromkeys(OTHER_BUDGETS, BUDGET_FIELD),
    "include_reasoning": Boolean(),
}


def reasoning_options(values: Mapping[str, Any]) -> ReasoningOptions:
    """Returns what the checked fields of a chat say. Raises RequestError for two bounds that
    differ."""
    given = [name for name in (BUDGET, *OTHER_BUDGETS) if values.get(name) is not None]
    for name in given[1:]:
        if values[name] != values[given[0]]:
            raise RequestError(f"{given[0]} and {name} are both set and differ", param=name)
    return ReasoningOptions(
        values.get("reasoning_effort"),
        values[given[0]] if given else None,
        values.get("enable_thinking"),
        given[0] if given else None,
    )
