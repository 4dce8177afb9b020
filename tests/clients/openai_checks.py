"""OpenAI's own client: chat, streams, tools, structured output, Responses, completions."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import openai
from checks import BASE, DICTATED, KEY, MODEL, TWO_SUMS, main
from pydantic import BaseModel, Field

CLIENT = openai.OpenAI(base_url=BASE, api_key=KEY)
ASK: Any = [{"role": "user", "content": "What is 2 plus 3?"}]
GREEDY: Any = {"model": MODEL, "temperature": 0}


class City(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    country: Literal["France", "Italy"]
    inhabitants: int


class Add(BaseModel):
    """Adds two numbers."""

    a: int
    b: int


def check_chat() -> None:
    answer = CLIENT.chat.completions.create(messages=ASK, logprobs=True, top_logprobs=2, **GREEDY)
    text = answer.choices[0].message.content or ""
    assert "5" in text and answer.usage is not None
    options: Any = {"stream_options": {"include_usage": True}} | GREEDY
    with CLIENT.chat.completions.stream(messages=ASK, **options) as stream:
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == text and whole.usage == answer.usage


def check_required_tool() -> None:
    tools = [openai.pydantic_function_tool(Add, name="add")]
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        options: Any = {"tools": tools, "tool_choice": choice, **GREEDY}
        whole = CLIENT.chat.completions.parse(messages=ASK, parallel_tool_calls=False, **options)
        with CLIENT.chat.completions.stream(messages=ASK, **options) as stream:
            streamed = stream.get_final_completion()
        for answer in (whole, streamed):
            for call in answer.choices[0].message.tool_calls or [None]:
                assert call is not None and isinstance(call.function.parsed_arguments, Add)


def check_chosen_tools() -> None:
    client = openai.OpenAI(base_url=DICTATED, api_key=KEY)
    messages: list[Any] = [{"role": "user", "content": TWO_SUMS}]
    tools: Any = [openai.pydantic_function_tool(Add, name="add")]
    message = client.chat.completions.parse(messages=messages, tools=tools, **GREEDY)
    messages.append(message.choices[0].message)  # with what the client has parsed
    for call in message.choices[0].message.tool_calls or []:
        result = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    assert len(messages) == 4
    answer = client.chat.completions.create(messages=messages, tools=tools, **GREEDY)
    assert answer.choices[0].message.content == "5 and 2."


def check_structured_output() -> None:
    chat = CLIENT.chat.completions.parse(messages=ASK, response_format=City, **GREEDY)
    assert isinstance(chat.choices[0].message.parsed, City)
    response = CLIENT.responses.parse(input="Paris", text_format=City, **GREEDY)
    assert isinstance(response.output_parsed, City)
    free = CLIENT.chat.completions.create(
        messages=ASK, response_format={"type": "json_object"}, **GREEDY
    )
    assert isinstance(json.loads(free.choices[0].message.content or ""), dict)


def check_responses() -> None:
    first = CLIENT.responses.create(input="What is 2 plus 3?", **GREEDY)
    assert "5" in first.output_text
    more: Any = {"input": "And 1 plus 1?", "previous_response_id": first.id, **GREEDY}
    with CLIENT.responses.stream(**more) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas) != ""


async def check_async_completions() -> None:
    async with openai.AsyncOpenAI(base_url=BASE, api_key=KEY) as client:
        options: Any = {"prompt": ["One day", "There was"], "max_tokens": 8, **GREEDY}
        whole = await client.completions.create(n=1, **options)
        texts = ["", ""]
        async for chunk in await client.completions.create(stream=True, **options):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in whole.choices]


def check_embeddings_and_models() -> None:
    vectors = CLIENT.embeddings.create(model=MODEL, input=["a fox", "a hen"]).data
    assert len(vectors[0].embedding) == len(vectors[1].embedding) > 0
    assert [model.id for model in CLIENT.models.list()] == [MODEL]


if __name__ == "__main__":
    main()
