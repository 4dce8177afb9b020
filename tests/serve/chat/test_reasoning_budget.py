"""A bound on reasoning in a real engine: it ends well, and no token depends on the batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from serve import LLM, SamplingParams
from serve.config import REASONING_BUDGET_MESSAGE
from serve.errors import ConfigError, RequestError
from serve.structured_output import StructuredOutput
from tests.support.engine.thinking import ALWAYS, thinking_checkpoint
from tests.support.preempted import until_preempted

USER = [{"role": "user", "content": "hello"}]
END = f"\n\n{REASONING_BUDGET_MESSAGE}\n</think>\n\n"
GREEDY = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=150, temperature=1.0, seed=5, ignore_eos=True, n=2)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(str(path), dtype="float32", max_num_seqs=16) as made:
        yield made


def bounded(budget: int, params: SamplingParams = GREEDY) -> SamplingParams:
    return replace(params, thinking_token_budget=budget)


def chat(llm: LLM, params: SamplingParams, **options: Any) -> Any:
    return llm.chat(USER, params, use_tqdm=False, **options)[0].outputs[0]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_the_reasoning_ends_at_its_bound(llm: LLM, params: SamplingParams) -> None:
    free = chat(llm, params)
    assert free.reasoning_tokens == 150, "the random model never ends its reasoning"
    end = llm.tokenizer.encode(END, add_special_tokens=False)
    for budget in (1, 17, 60):
        answer = chat(llm, bounded(budget, params))
        at = next(i for i in range(budget, budget + 9) if answer.token_ids[i : i + 3] == end[:3])
        assert answer.token_ids[:at] == free.token_ids[:at]
        assert answer.token_ids[at : at + len(end)] == end
        assert len(answer.token_ids) == 150
        assert answer.reasoning.endswith(REASONING_BUDGET_MESSAGE)
        assert answer.text.partition(END)[2].lstrip("\n") == answer.content != ""
        assert at < answer.reasoning_tokens <= at + len(end)
    assert chat(llm, bounded(150, params)).token_ids == free.token_ids


def test_reasoning_is_turned_off(llm: LLM) -> None:
    """By the bound 0, by effort and by the template's switch, which the template knows."""
    ways: list[tuple[SamplingParams, dict[str, Any]]] = [
        (bounded(0), {}),
        (GREEDY, {"reasoning_effort": "none"}),
        (GREEDY, {"chat_template_kwargs": {"enable_thinking": False}}),
        (bounded(20), {"chat_template_kwargs": {"enable_thinking": False}}),
        (GREEDY, {"chat_template_kwargs": {"thinking_budget": 0}}),
    ]
    answers = [chat(llm, params, **options) for params, options in ways]
    assert {tuple(answer.token_ids) for answer in answers} == {tuple(answers[0].token_ids)}
    assert answers[0].reasoning is None and answers[0].content
    assert answers[0].reasoning_tokens == 0


def test_a_template_that_always_reasons(tmp_path: Path) -> None:
    """The bound 0 ends at once what the prompt has begun; a grammar knows that it is open."""
    with LLM(str(thinking_checkpoint(tmp_path, ALWAYS)), dtype="float32") as llm:
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        assert chat(llm, GREEDY, **off).text.startswith("\n</think>\n\n")
        structured = StructuredOutput("json_schema", json.dumps(SCHEMA))
        answer = chat(llm, replace(GREEDY, structured=structured, ignore_eos=False), **off)
        assert answer.text.startswith("\n</think>\n\n")
        jsonschema.validate(json.loads(answer.content), SCHEMA)


def test_efforts_are_bounds_where_the_template_knows_none(llm: LLM, path: Path) -> None:
    with LLM(str(path), dtype="float32", reasoning_budget=3) as default:
        long = replace(GREEDY, max_tokens=700)
        assert END in chat(llm, long, reasoning_effort="minimal").text
        assert END not in chat(default, long, reasoning_effort="low").text
        assert chat(default, GREEDY).token_ids == chat(llm, bounded(3)).token_ids
        assert chat(default, bounded(-1)).token_ids == chat(llm, GREEDY).token_ids
        assert chat(default, bounded(9)).token_ids == chat(llm, bounded(9)).token_ids


def test_no_token_depends_on_the_batch(path: Path, llm: LLM) -> None:
    """Alone, among others, with prompts cut in chunks, preempted and without a prefix cache."""
    conversations = [[{"role": "user", "content": "word " * size}] for size in (1, 9, 40, 90)]
    budgets = (0, 5, 40, 70)
    params = [bounded(budget, SAMPLED) for budget in budgets]
    structured = StructuredOutput("json_schema", json.dumps(SCHEMA))
    params += [replace(each, structured=structured, ignore_eos=False) for each in params]
    asked = conversations * 2
    alone = [llm.chat(m, p, use_tqdm=False)[0] for m, p in zip(asked, params, strict=True)]

    def tokens(outputs: list[Any]) -> list[list[int]]:
        return [each.token_ids for output in outputs for each in output.outputs]

    assert tokens(llm.chat(asked, params, use_tqdm=False)) == tokens(alone)
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "max_chunk_tokens": 7}
    settings |= {"memory_policy": "prompt_only", "prefix_cache": False, "max_model_len": 800}
    with LLM(str(path), dtype="float32", kv_cache_bytes=800 * 512, **settings) as other:
        results = until_preempted(other, lambda: other.chat(asked, params, use_tqdm=False))
        assert tokens(results) == tokens(alone)


def test_structured_output_follows_the_reasoning(llm: LLM) -> None:
    structured = StructuredOutput("json_schema", json.dumps(SCHEMA))
    for params in (GREEDY, SAMPLED):
        asked = replace(params, ignore_eos=False, structured=structured)
        answer = chat(llm, bounded(12, asked))
        assert answer.reasoning.endswith(REASONING_BUDGET_MESSAGE)
        jsonschema.validate(json.loads(answer.content), SCHEMA)
        assert answer.finish_reason == "stop"


def test_forced_calls_follow_the_reasoning(llm: LLM) -> None:
    answer = chat(
        llm,
        bounded(12, replace(SAMPLED, ignore_eos=False, max_tokens=400)),
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    assert (answer.finish_reason, answer.content) == ("tool_calls", None)
    (call,) = answer.tool_calls
    assert call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    assert answer.reasoning.endswith(REASONING_BUDGET_MESSAGE)
    said = [*USER, answer.message(), {"role": "tool", "tool_call_id": call["id"], "content": "4"}]
    second = llm.chat(said, bounded(3), tools=TOOLS, use_tqdm=False)[0]
    prompt = llm.tokenizer.decode(second.prompt_token_ids)
    assert '<tool_call>{"name": "weather", "arguments": {"city"' in prompt
    assert second.outputs[0].tool_calls == []


def test_stop_strings_logprobs_and_limits(llm: LLM) -> None:
    whole = chat(llm, bounded(10))
    described = chat(llm, bounded(10, replace(GREEDY, logprobs=2)))
    assert described.token_ids == whole.token_ids
    assert len(described.logprobs) == len(whole.token_ids)
    for token, items in zip(described.token_ids, described.logprobs, strict=True):
        assert -100 < items[token].logprob <= 0, "of the raw logits, for forced tokens too"
    stopped = chat(llm, bounded(10, replace(GREEDY, stop="what I have")))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "what I have")
    assert stopped.reasoning.endswith("answer with ")
    cut = chat(llm, bounded(10, replace(GREEDY, max_tokens=30)))
    assert cut.token_ids == whole.token_ids[:30]
    assert (cut.finish_reason, cut.content) == ("length", None)
    odd = replace(GREEDY, bad_words=["so far"], repetition_penalty=1.5, min_tokens=140)
    odd = replace(odd, logit_bias=dict.fromkeys(llm.tokenizer.encode("</think>"), -100.0))
    assert END in chat(llm, bounded(10, odd)).text


def test_a_message_that_is_continued_inside_its_reasoning(llm: LLM) -> None:
    for said, thinks in (("<think>I am", True), ("<think>I am</think>so", False)):
        messages = [*USER, {"role": "assistant", "content": said}]
        answer = llm.chat(messages, bounded(4), continue_final_message=True, use_tqdm=False)
        assert (END in answer[0].outputs[0].text) == thinks


def test_generate_takes_the_bound(llm: LLM) -> None:
    prompt = "hello <think>"
    answer = llm.generate(prompt, bounded(4), use_tqdm=False)[0].outputs[0]
    assert END in answer.text
    outside, free = llm.generate(["hello"] * 2, [bounded(4), GREEDY], use_tqdm=False)
    assert outside.outputs[0].token_ids == free.outputs[0].token_ids


def test_the_closing_sentence_is_a_setting(path: Path) -> None:
    with LLM(str(path), dtype="float32", reasoning_budget_message="Enough.") as llm:
        assert "\n\nEnough.\n</think>\n\n" in chat(llm, bounded(5)).text
    with LLM(str(path), dtype="float32", reasoning_budget_message="") as llm:
        assert "\n</think>\n\n" in chat(llm, bounded(5)).text[:30]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reasoning_budget", -2),
        ("reasoning_budget", 1.5),
        ("reasoning_budget", True),
        ("reasoning_budget_message", "a" * 2000),
        ("reasoning_budget_message", None),
    ],
)
def test_wrong_settings(path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        LLM(str(path), **{name: value})


def test_a_model_without_reasoning_refuses_a_bound(path: Path) -> None:
    with LLM(str(path), dtype="float32", reasoning_parser="none", reasoning_budget=2) as llm:
        assert chat(llm, GREEDY).reasoning is None
        for call in (llm.chat, llm.generate):
            prompt: Any = USER if call == llm.chat else "hello"
            with pytest.raises(RequestError, match="thinking_token_budget is not") as caught:
                call(prompt, bounded(5), use_tqdm=False)
            assert caught.value.param == "thinking_token_budget"


@pytest.mark.parametrize("value", [-2, 1.5, True, "7"])
def test_wrong_bounds(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(thinking_token_budget=value)
    assert caught.value.param == "thinking_token_budget"
