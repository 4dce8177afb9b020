"""What a request says about reasoning, and what follows for the template and the sampler."""

from __future__ import annotations

from typing import Any

import pytest

from serve.chat.reasoning import EFFORT_TOKENS, EFFORTS, ReasoningOptions, plan_reasoning
from serve.errors import RequestError

QWEN = "{% if enable_thinking is false %}</think>{% endif %}"
GPT_OSS = "Reasoning: {{ reasoning_effort }}"
SEED = "{% if thinking_budget %}{{ thinking_budget }}{% endif %}"
DEEPSEEK = "{% if thinking %}<think>{% endif %}"
PLAIN = "<think>"
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}


@pytest.mark.parametrize(
    ("template", "options", "given", "kwargs", "bound"),
    [
        (QWEN, {}, {}, {}, 99),
        (QWEN, {"is_enabled": True}, {}, ON, 99),
        (QWEN, {"is_enabled": False}, {}, OFF, 0),
        (QWEN, {"max_tokens": 7}, {}, {}, 7),
        (QWEN, {"max_tokens": 0}, {}, OFF, 0),
        (QWEN, {"max_tokens": -1}, {}, {}, None),
        (QWEN, {"max_tokens": 7, "is_enabled": True}, {}, ON, 7),
        (QWEN, {"max_tokens": 7, "is_enabled": False}, {}, OFF, 0),
        (QWEN, {"max_tokens": 7}, OFF, OFF, 0),
        (QWEN, {"is_enabled": False}, ON, ON, 99),
        (QWEN, {}, {"thinking_budget": 5}, {"thinking_budget": 5}, 5),
        (QWEN, {"max_tokens": 3}, {"thinking_budget": 5}, {"thinking_budget": 5}, 3),
        (QWEN, {"effort": "none"}, {}, {"reasoning_effort": "none", **OFF}, 0),
        (QWEN, {"effort": "low"}, {}, {"reasoning_effort": "low"}, EFFORT_TOKENS["low"]),
        (QWEN, {"effort": "max"}, {}, {"reasoning_effort": "max"}, None),
        (QWEN, {"effort": "low", "max_tokens": 9}, {}, {"reasoning_effort": "low"}, 9),
        (GPT_OSS, {"effort": "low"}, {}, {"reasoning_effort": "low"}, 99),
        (GPT_OSS, {"effort": "low", "max_tokens": 9}, {}, {"reasoning_effort": "low"}, 9),
        (SEED, {"max_tokens": 9}, {}, {"thinking_budget": 9}, 9),
        (SEED, {"max_tokens": 0}, {}, {"thinking_budget": 0, **OFF}, 0),
        (SEED, {"max_tokens": -1}, {}, {}, None),
        (DEEPSEEK, {"is_enabled": True}, {}, {"thinking": True, **ON}, 99),
        (DEEPSEEK, {}, {"thinking": False}, {"thinking": False, **OFF}, 0),
        (PLAIN, {"is_enabled": False}, {}, OFF, 0),
    ],
)
def test_what_follows(
    template: str,
    options: dict[str, Any],
    given: dict[str, Any],
    kwargs: dict[str, Any],
    bound: int | None,
) -> None:
    plan = plan_reasoning(ReasoningOptions(**options), given, template, 99)
    assert (plan.template_kwargs, plan.max_tokens) == (kwargs, bound)


@pytest.mark.parametrize("effort", EFFORTS)
def test_every_effort_has_a_bound_or_none(effort: str) -> None:
    plan = plan_reasoning(ReasoningOptions(effort), {}, PLAIN, 99)
    assert plan.max_tokens == (None if effort in ("xhigh", "max") else EFFORT_TOKENS[effort])


@pytest.mark.parametrize("value", [-2, "5", 1.5, True, 1 << 70])
def test_a_wrong_budget_of_the_template(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        plan_reasoning(ReasoningOptions(), {"thinking_budget": value}, QWEN, None)
    assert caught.value.param == "chat_template_kwargs.thinking_budget"
