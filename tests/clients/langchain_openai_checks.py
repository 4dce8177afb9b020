"""LangChain's ChatOpenAI: invoke, batch, streams, tools, an agent's turn, structured output."""

from __future__ import annotations

from typing import Any, Literal

from checks import BASE, DICTATED, FORMATS, KEY, MODEL, SUMMED, TWO_SUMS, main
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


def chat(base_url: str = BASE, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=base_url, api_key=KEY, model=MODEL, temperature=0, **options)


class Person(BaseModel):
    """A person."""

    name: str = Field(description="The name.")
    age: int
    hobbies: list[str]


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"] = Field(description="What it is.")


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def check_chat() -> None:
    answer = chat().invoke([SystemMessage("Be brief."), HumanMessage("What is 2 plus 3?")])
    assert "5" in answer.content
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"


def check_chain_batch_and_stream() -> None:
    prompt = ChatPromptTemplate.from_messages([("user", "What is {a} plus {b}?")])
    chain = prompt | chat() | StrOutputParser()
    assert [t for t in chain.batch([{"a": 1, "b": 1}, {"a": 2, "b": 2}]) if t]
    pieces = list(chain.stream({"a": 2, "b": 3}))
    assert "5" in "".join(pieces)


async def check_async_stream_with_usage() -> None:
    whole = None
    async for chunk in chat(stream_usage=True).astream("What is 2 plus 3?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and "5" in whole.content
    assert whole.usage_metadata["total_tokens"] > 0


def check_logprobs() -> None:
    answer = chat(logprobs=True, top_logprobs=2).invoke("hello")
    entries = answer.response_metadata["logprobs"]["content"]
    assert len(entries) == answer.usage_metadata["output_tokens"]


def check_required_tool_and_its_result() -> None:
    # many calls would leave no room for the next answer in the model's short context
    tools = [add, Animal]
    model = chat().bind_tools(tools, tool_choice="any", parallel_tool_calls=False)
    answer = model.invoke("What is 2 plus 3?")
    assert isinstance(answer, AIMessage) and answer.tool_calls and not answer.invalid_tool_calls
    messages: list[Any] = [HumanMessage("What is 2 plus 3?"), answer]
    for call in answer.tool_calls:
        assert call["name"] in ("add", "Animal")
        messages.append(ToolMessage("5", tool_call_id=call["id"]))
    assert isinstance(chat().bind_tools(tools).invoke(messages).content, str)


def check_named_tool_streamed() -> None:
    model = chat().bind_tools([add], tool_choice="add", parallel_tool_calls=False)
    whole = None
    for chunk in model.stream("What is 2 plus 3?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    (call,) = whole.tool_calls
    assert set(call["args"]) == {"a", "b"}
    add.invoke(call)


def check_optional_tool() -> None:
    assert "5" in chat().bind_tools([add]).invoke("What is 2 plus 3?").content


def check_chosen_tools_and_their_results() -> None:
    """The model chooses two calls at once, whole and streamed, over both APIs."""
    for uses_responses in (False, True):
        model = chat(DICTATED, use_responses_api=uses_responses).bind_tools([add])
        for is_streamed in (False, True):
            messages: list[Any] = [HumanMessage(TWO_SUMS)]
            if is_streamed:
                first, *rest = model.stream(messages)
                answer = sum(rest, first)
            else:
                answer = model.invoke(messages)
            assert [call["args"] for call in answer.tool_calls] == [
                {"a": 2, "b": 3},
                {"a": 1, "b": 1},
            ]
            messages += [answer, *(add.invoke(call) for call in answer.tool_calls)]
            assert model.invoke(messages).text == "5 and 2."


def check_rounds_in_each_format() -> None:
    """Two rounds of calls in the format of each family."""
    for base_url, text in FORMATS.values():
        model = chat(base_url).bind_tools([add])
        messages: list[Any] = [HumanMessage(text)]
        for arguments in ({"a": 2, "b": 3}, {"a": 1, "b": 1}):
            answer = model.invoke(messages)
            assert [call["args"] for call in answer.tool_calls] == [arguments]
            messages += [answer, *(add.invoke(call) for call in answer.tool_calls)]
        assert model.invoke(messages).text == SUMMED


def check_a_prompt_that_is_too_long() -> None:
    try:
        chat().invoke("word " * 2000)
    except ContextOverflowError:
        return
    raise AssertionError("no ContextOverflowError")


def check_structured_by_schema() -> None:
    person = chat().with_structured_output(Person, method="json_schema").invoke("Anna is 7.")
    assert isinstance(person, Person)


def check_structured_by_function() -> None:
    model = chat().with_structured_output(Person, method="function_calling", include_raw=True)
    result = model.invoke("Anna is 7.")
    assert isinstance(result["parsed"], Person), result


def check_structured_by_json_mode() -> None:
    model = chat().with_structured_output(method="json_mode")
    assert isinstance(model.invoke("Answer in JSON: Anna is 7."), dict)


def check_structured_stream() -> None:
    pieces = list(chat().with_structured_output(Person).stream("Anna is 7."))
    assert isinstance(pieces[-1], Person)


def check_responses_api() -> None:
    model = chat(use_responses_api=True)
    assert "5" in model.invoke("What is 2 plus 3?").text
    assert "5" in "".join(chunk.text for chunk in model.stream("What is 2 plus 3?"))
    forced = model.bind_tools([add], tool_choice="add").invoke("What is 2 plus 3?")
    assert forced.tool_calls[0]["name"] == "add"
    person = model.with_structured_output(Person).invoke("Anna is 7.")
    assert isinstance(person, Person)


def check_responses_api_continued() -> None:
    model = chat(use_responses_api=True, use_previous_response_id=True)
    first = model.invoke("What is 2 plus 3?")
    again = model.invoke([HumanMessage("What is 2 plus 3?"), first, HumanMessage("And 1 plus 1?")])
    assert again.text


def check_completions() -> None:
    model = OpenAI(base_url=BASE, api_key=KEY, model=MODEL, max_tokens=8, temperature=0)
    assert model.invoke("Once upon a time")
    assert model.batch(["Once", "There was a fox"])
    assert "".join(model.stream("Once upon a time"))


def check_embeddings() -> None:
    embeddings = OpenAIEmbeddings(
        base_url=BASE, api_key=KEY, model=MODEL, check_embedding_ctx_length=False
    )
    vectors = embeddings.embed_documents(["a fox", "a hen"])
    assert len(vectors) == 2 and len(vectors[0]) == len(embeddings.embed_query("a fox"))


if __name__ == "__main__":
    main()
