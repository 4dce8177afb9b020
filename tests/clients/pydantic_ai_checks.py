"""pydantic-ai's Agent: text, tools, its three ways to structured output, streams, both APIs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from checks import BASE, DICTATED, DICTATED_ROOT, KEY, MODEL, ROOT, TWO_SUMS, main
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, PromptedOutput, RunContext, ToolOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.vllm import VLLMProvider

PROVIDER = OpenAIProvider(base_url=BASE, api_key=KEY)
CHAT = OpenAIChatModel(MODEL, provider=PROVIDER)
RESPONSES = OpenAIResponsesModel(MODEL, provider=PROVIDER)
VLLM = OpenAIChatModel(MODEL, provider=VLLMProvider(base_url=BASE, api_key=KEY))
MESSAGES = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=ROOT, api_key=KEY))
DICTATED_PROVIDER = OpenAIProvider(base_url=DICTATED, api_key=KEY)
DICTATED_MODELS = (
    OpenAIChatModel(MODEL, provider=DICTATED_PROVIDER),
    OpenAIResponsesModel(MODEL, provider=DICTATED_PROVIDER),
    AnthropicModel(MODEL, provider=AnthropicProvider(base_url=DICTATED_ROOT, api_key=KEY)),
)
GREEDY = ModelSettings(temperature=0)


class City(BaseModel):
    """A city."""

    name: Annotated[str, Field(max_length=12)]
    country: Literal["France", "Italy"]
    inhabitants: int
    is_capital: bool


def adding_agent(model: Any, settings: Any) -> tuple[Agent, list[int]]:
    """Returns an agent with a tool that adds, and the list of what the tool has returned."""
    agent, sums = Agent(model, model_settings=settings), []

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        sums.append(a + b)
        return a + b

    return agent, sums


async def check_text_and_history() -> None:
    for model in (CHAT, RESPONSES, VLLM, MESSAGES):
        agent = Agent(model, instructions="Be brief.", model_settings=GREEDY)
        first = await agent.run("What is 2 plus 3?")
        assert "5" in first.output, model
        assert first.usage.output_tokens > 0
        second = await agent.run("And 1 plus 1?", message_history=first.all_messages())
        assert second.output and len(second.all_messages()) == 4


async def check_text_stream() -> None:
    for model in (CHAT, RESPONSES, MESSAGES):
        async with Agent(model, model_settings=GREEDY).run_stream("What is 2 plus 3?") as run:
            pieces = [piece async for piece in run.stream_text(delta=True)]
        assert "5" in "".join(pieces), model


async def check_tool_output() -> None:
    for model in (CHAT, RESPONSES, VLLM, MESSAGES):
        agent = Agent(model, output_type=ToolOutput(City), model_settings=GREEDY)
        assert isinstance((await agent.run("What is the capital of France?")).output, City), model


async def check_native_output() -> None:
    for model in (CHAT, RESPONSES, VLLM):
        agent = Agent(model, output_type=NativeOutput(City), model_settings=GREEDY)
        assert isinstance((await agent.run("What is the capital of France?")).output, City), model


async def check_prompted_output() -> None:
    class Anything(BaseModel):
        """An object."""

    agent = Agent(VLLM, output_type=PromptedOutput(Anything), model_settings=GREEDY)
    assert isinstance((await agent.run("Hello")).output, Anything)


async def check_union_output() -> None:
    agent = Agent(CHAT, output_type=[City, int], model_settings=GREEDY)
    assert isinstance((await agent.run("What is 2 plus 3?")).output, City | int)


async def check_output_stream() -> None:
    agent = Agent(CHAT, output_type=City, model_settings=GREEDY)
    async with agent.run_stream("What is the capital of France?") as run:
        outputs = [output async for output in run.stream_output()]
    assert isinstance(outputs[-1], City)


async def check_forced_tool_then_answer() -> None:
    """A first request that must call the tool, and a second one that has its result."""

    def settings(context: RunContext[None]) -> ModelSettings:
        choice: Any = ["add"] if context.run_step == 1 else "none"
        return ModelSettings(temperature=0, tool_choice=choice)

    for model in (CHAT, RESPONSES):
        agent, sums = adding_agent(model, settings)
        run = await agent.run("What is 2 plus 3?")
        assert sums and isinstance(run.output, str), model


async def check_chosen_tools() -> None:
    """An agent that calls two tools at once, hears the results and answers; whole and streamed."""
    for model in DICTATED_MODELS:
        agent, sums = adding_agent(model, GREEDY)
        run = await agent.run(TWO_SUMS)
        assert run.output == "5 and 2." and sorted(sums) == [2, 5], (model, sums)
        async with agent.run_stream(TWO_SUMS) as stream:
            assert await stream.get_output() == "5 and 2.", model
        assert sorted(sums) == [2, 2, 5, 5], model


async def check_a_prompt_that_is_too_long() -> None:
    for model in (CHAT, RESPONSES, MESSAGES):
        try:
            await Agent(model).run("word " * 2000)
        except ModelContextWindowExceededError:
            continue
        raise AssertionError(f"{model}: no ModelContextWindowExceededError")


if __name__ == "__main__":
    main()
