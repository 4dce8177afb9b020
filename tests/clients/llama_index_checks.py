"""LlamaIndex with OpenAILike: chat, streams, completions, structured prediction, its agents."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from checks import BASE, DICTATED, KEY, MODEL, TWO_SUMS, calls, main, say
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel, Field

ASK = [ChatMessage(role="user", content="What is 2 plus 3?")]
CITY = PromptTemplate("What is the capital of {country}?")


class City(BaseModel):
    """A city."""

    name: Annotated[str, Field(max_length=12)]
    country: Literal["France", "Italy"]
    inhabitants: int


def llm(base_url: str = BASE, **options: Any) -> OpenAILike:
    common = {"model": MODEL, "api_base": base_url, "api_key": KEY, "temperature": 0}
    options = {"is_chat_model": True, "context_window": 1024} | options
    return OpenAILike(**common, **options)


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def check_chat() -> None:
    assert "5" in llm().chat(ASK).message.content
    assert "5" in "".join(piece.delta for piece in llm().stream_chat(ASK))


async def check_async_chat() -> None:
    assert "5" in (await llm().achat(ASK)).message.content


def check_completion() -> None:
    model = llm(is_chat_model=False, max_tokens=8)
    assert model.complete("Once upon a time").text
    assert "".join(piece.delta for piece in model.stream_complete("Once upon a time"))


def check_required_tool() -> None:
    model = llm(is_function_calling_model=True)
    tool = FunctionTool.from_defaults(add)
    answer = model.chat_with_tools([tool], ASK[0].content, tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert calls and all(set(call.tool_kwargs) == {"a", "b"} for call in calls)
    result = model.predict_and_call([tool], ASK[0].content, tool_required=True)
    assert result.sources


def check_structured_predict() -> None:
    for options in ({"is_function_calling_model": True}, {"should_use_structured_outputs": True}):
        model = llm(**options)
        assert isinstance(model.structured_predict(City, CITY, country="France"), City)
        assert isinstance(model.as_structured_llm(City).chat(ASK).raw, City)


def check_stream_structured_predict() -> None:
    """By a schema, and by a call that the library leaves to the model when it streams."""
    paris = {"name": "Paris", "country": "France", "inhabitants": 2}
    model = llm(DICTATED, is_function_calling_model=True, context_window=1 << 17)
    text = say(calls(("City", paris)))
    *_, last = model.stream_structured_predict(City, PromptTemplate("{text}"), text=text)
    assert City.model_validate(last.model_dump()) == City(**paris)
    model = llm(should_use_structured_outputs=True)
    *_, last = model.stream_structured_predict(City, CITY, country="France")
    assert City.model_validate(last.model_dump())


def check_responses() -> None:
    model = OpenAILikeResponses(
        model=MODEL, api_base=BASE, api_key=KEY, temperature=0, context_window=1024
    )
    assert "5" in model.chat(ASK).message.content
    assert "5" in "".join(piece.delta or "" for piece in model.stream_chat(ASK))


async def check_function_agent() -> None:
    model = llm(is_function_calling_model=True)
    agent = FunctionAgent(tools=[add], llm=model, system_prompt="Be brief.")
    assert "5" in str(await agent.run("What is 2 plus 3?"))


async def check_function_agent_with_chosen_calls() -> None:
    model = llm(DICTATED, is_function_calling_model=True, context_window=1 << 17)
    for streaming in (False, True):
        agent = FunctionAgent(tools=[add], llm=model, streaming=streaming)
        result = await agent.run(TWO_SUMS)
        assert str(result) == "5 and 2." and len(result.tool_calls) == 2


async def check_function_agent_with_a_required_call() -> None:
    model = llm(is_function_calling_model=True)
    agent = FunctionAgent(tools=[add], llm=model, initial_tool_choice="add")
    result = await agent.run("What is 2 plus 3?")
    assert result.tool_calls and str(result)


if __name__ == "__main__":
    main()
