"""The OpenAI Agents SDK: Runner with tools, output types, handoffs and streams, over both APIs."""

from __future__ import annotations

from typing import Annotated, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from checks import BASE, DICTATED, FORMATS, KEY, MODEL, SUMMED, TWO_SUMS, calls, main, say
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(True)
sums: list[int] = []


class City(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    country: Literal["France", "Italy"]
    inhabitants: int


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    sums.append(a + b)
    return str(a + b)


def models(base_url: str = BASE) -> list[OpenAIChatCompletionsModel | OpenAIResponsesModel]:
    client = AsyncOpenAI(base_url=base_url, api_key=KEY)
    return [OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)]


GREEDY = ModelSettings(temperature=0)


async def check_text() -> None:
    for model in models():
        agent = Agent(name="a", instructions="Be brief.", model=model, model_settings=GREEDY)
        result = await Runner.run(agent, "What is 2 plus 3?")
        assert "5" in result.final_output
        follow_up = [*result.to_input_list(), {"role": "user", "content": "And 1 plus 1?"}]
        assert (await Runner.run(agent, follow_up)).final_output


async def check_stream() -> None:
    for model in models():
        agent = Agent(name="a", model=model, model_settings=GREEDY)
        result = Runner.run_streamed(agent, "What is 2 plus 3?")
        events = [e.data async for e in result.stream_events() if e.type == "raw_response_event"]
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == result.final_output and "5" in text


async def check_session() -> None:
    for model in models():
        session = SQLiteSession("test")
        agent = Agent(name="a", model=model, model_settings=GREEDY)
        await Runner.run(agent, "Hello", session=session)
        await Runner.run(agent, "What is 2 plus 3?", session=session)
        assert len(await session.get_items()) == 4


async def check_required_tool() -> None:
    """The first turn must call; the SDK then resets the choice, and the second turn answers."""
    for model in models():
        sums.clear()
        settings = ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False)
        agent = Agent(name="a", model=model, tools=[add], model_settings=settings)
        result = await Runner.run(agent, "What is 2 plus 3?")
        assert len(sums) == 1
        assert isinstance(result.final_output, str)


async def check_parallel_tools_streamed() -> None:
    for model in models():
        sums.clear()
        settings = ModelSettings(temperature=0, tool_choice="add", parallel_tool_calls=True)
        agent = Agent(name="a", model=model, tools=[add], model_settings=settings)
        result = Runner.run_streamed(agent, "What is 2 plus 3?")
        names = [event.name async for event in result.stream_events() if "item" in event.type]
        assert sums and names.count("tool_called") == names.count("tool_output") == len(sums)


async def check_stop_on_tool() -> None:
    for model in models():
        settings = ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False)
        agent = Agent(
            name="a",
            model=model,
            tools=[add],
            model_settings=settings,
            tool_use_behavior="stop_on_first_tool",
        )
        result = await Runner.run(agent, "What is 2 plus 3?")
        assert result.final_output == str(sums[-1])


async def check_output_type() -> None:
    for model in models():
        agent = Agent(name="a", model=model, output_type=City, model_settings=GREEDY)
        result = await Runner.run(agent, "What is the capital of France?")
        assert isinstance(result.final_output, City)


async def check_handoff() -> None:
    for model in models():
        other = Agent(name="b", model=model, model_settings=GREEDY, handoff_description="Counts.")
        first = Agent(
            name="a",
            model=model,
            handoffs=[other],
            model_settings=ModelSettings(temperature=0, tool_choice="required"),
        )
        result = await Runner.run(first, "What is 2 plus 3?")
        assert result.last_agent.name == "b"


async def check_chosen_tools() -> None:
    for model in models(DICTATED):
        agent = Agent(name="a", model=model, tools=[add])
        sums.clear()
        assert (await Runner.run(agent, TWO_SUMS)).final_output == "5 and 2."
        assert sorted(sums) == [2, 5]
        result = Runner.run_streamed(agent, TWO_SUMS)
        names = [event.name async for event in result.stream_events() if "item" in event.type]
        assert result.final_output == "5 and 2." and names.count("tool_output") == 2


async def check_rounds_in_each_format() -> None:
    """Two rounds of calls in the format of each family, whole and streamed, over both APIs."""
    for base_url, text in FORMATS.values():
        for model in models(base_url):
            agent = Agent(name="a", model=model, tools=[add])
            sums.clear()
            assert (await Runner.run(agent, text)).final_output == SUMMED
            assert sums == [5, 2]
            result = Runner.run_streamed(agent, text)
            names = [event.name async for event in result.stream_events() if "item" in event.type]
            assert result.final_output == SUMMED and names.count("tool_output") == 2


async def check_chosen_handoff() -> None:
    for model in models(DICTATED):
        other = Agent(name="b", model=model)
        first = Agent(name="a", model=model, handoffs=[other])
        result = await Runner.run(first, say(calls(("transfer_to_b", {})), "I am b."))
        assert result.last_agent is other and result.final_output == "I am b."


if __name__ == "__main__":
    main()
