"""LiteLLM as a library: completion, responses, Anthropic's messages, embeddings, its router."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import litellm
from checks import BASE, DICTATED, DICTATED_ROOT, KEY, MODEL, ROOT, TWO_SUMS, main
from pydantic import BaseModel, Field

litellm.suppress_debug_info = True
ASK = [{"role": "user", "content": "What is 2 plus 3?"}]
PROVIDERS = ("openai", "hosted_vllm")
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class City(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    country: Literal["France", "Italy"]
    inhabitants: int


def options(provider: str) -> dict[str, Any]:
    options: dict[str, Any] = {"model": f"{provider}/{MODEL}", "api_base": BASE, "api_key": KEY}
    return options | {"temperature": 0, "num_retries": 0}


def check_completion() -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(messages=ASK, **options(provider))
        assert "5" in answer.choices[0].message.content
        assert answer.usage.completion_tokens > 0
        pieces = litellm.completion(
            messages=ASK, stream=True, stream_options={"include_usage": True}, **options(provider)
        )
        chunks = list(pieces)
        whole = litellm.stream_chunk_builder(chunks)
        assert "5" in whole.choices[0].message.content and whole.usage.total_tokens > 0


async def check_async_completion() -> None:
    answer = await litellm.acompletion(messages=ASK, **options("openai"))
    assert "5" in answer.choices[0].message.content


def check_tools() -> None:
    for provider in PROVIDERS:
        forced = options(provider) | {"tools": [ADD], "parallel_tool_calls": False}
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            message = (
                litellm.completion(messages=ASK, tool_choice=choice, **forced).choices[0].message
            )
            (call,) = message.tool_calls
            assert set(json.loads(call.function.arguments)) == {"a", "b"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        history = [*ASK, message, result]
        assert litellm.completion(messages=history, **options(provider)).choices[0].message


def check_chosen_tools() -> None:
    for model, base in (
        (f"openai/{MODEL}", DICTATED),
        (f"hosted_vllm/{MODEL}", DICTATED),
        (f"anthropic/{MODEL}", DICTATED_ROOT),
    ):
        for stream in (False, True):
            messages: list[Any] = [{"role": "user", "content": TWO_SUMS}]
            common = {"model": model, "api_base": base, "api_key": KEY, "tools": [ADD]}
            answer = litellm.completion(messages=messages, stream=stream, **common)
            if stream:
                answer = litellm.stream_chunk_builder(list(answer))
            message = answer.choices[0].message
            assert len(message.tool_calls) == 2, (model, message)
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": "5"}
                for call in message.tool_calls
            ]
            messages += [message, *results]
            answer = litellm.completion(messages=messages, **common)
            assert answer.choices[0].message.content == "5 and 2.", (model, stream)


def check_structured_output() -> None:
    for provider in PROVIDERS:
        answer = litellm.completion(messages=ASK, response_format=City, **options(provider))
        City.model_validate_json(answer.choices[0].message.content)
        answer = litellm.completion(
            messages=ASK, response_format={"type": "json_object"}, **options(provider)
        )
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def check_responses() -> None:
    answer = litellm.responses(input="What is 2 plus 3?", **options("openai"))
    text = answer.output[0].content[0].text
    assert "5" in text
    events = list(litellm.responses(input="What is 2 plus 3?", stream=True, **options("openai")))
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == text


async def check_anthropic_messages() -> None:
    """LiteLLM's route for Anthropic's clients, over both of the server's APIs."""
    for model, base in ((f"anthropic/{MODEL}", ROOT), (f"hosted_vllm/{MODEL}", BASE)):
        answer: Any = await litellm.anthropic_messages(
            model=model, api_base=base, api_key=KEY, messages=ASK, max_tokens=64, temperature=0
        )
        assert "5" in answer["content"][0]["text"], answer


def check_anthropic_provider() -> None:
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=ROOT, api_key=KEY, messages=ASK, max_tokens=64
    )
    assert answer.choices[0].message.content


def check_text_completion_and_embedding() -> None:
    for provider in ("text-completion-openai", "hosted_vllm"):
        answer = litellm.text_completion(
            prompt="Once upon a time", max_tokens=8, **options(provider)
        )
        assert answer.choices[0].text
    for provider in PROVIDERS:
        vectors = litellm.embedding(
            model=f"{provider}/{MODEL}", api_base=BASE, api_key=KEY, input=["a fox", "a hen"]
        )
        assert len(vectors.data) == 2


def check_errors_are_mapped() -> None:
    long = [{"role": "user", "content": "word " * 5000}]
    for provider in PROVIDERS:
        try:
            litellm.completion(messages=long, **options(provider))
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(f"{provider}: no ContextWindowExceededError")


if __name__ == "__main__":
    main()
