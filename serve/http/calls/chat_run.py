"""One conversation that the engine answers, and its answer in parts, for all APIs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NamedTuple, Self

from serve.errors import RequestError
from serve.http.calls.context import Call
from serve.http.calls.generation import Generation, parameters_named
from serve.request import FinishReason, TokenDelta
from serve.sampling_params import SamplingParams
from serve.structured_output import StructuredOutput
from serve.text.chat_parser import (
    Parser,
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
    make_parser,
)
from serve.text.chat_parser.grammar import calls_or_content, content_after_reasoning, forced_calls

_TAIL_TOKENS = 16  # the prompt's last tokens, which show whether it ends inside the reasoning


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation and how to answer it.

    messages: as chat templates take them (role, content, tool_calls, tool_call_id, name,
    reasoning_content). tools: OpenAI's function tools. tool_choice: "none", "auto", "required" or
    ("function", name). template_kwargs: scalars for the template by name. include_reasoning:
    False drops the reasoning from the answer. client: as in Engine.submit. bounded_json: that of
    the arguments of calls; None takes the engine's setting.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str | tuple[str, str] = "auto"
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True
    client: str | None = None
    bounded_json: bool | None = None


class ChatStep(NamedTuple):
    """One step of a choice: the engine's delta and its text as parts. finish_reason is set
    in the last step of a choice: "stop", "length" or "tool_calls"."""

    choice: int
    delta: TokenDelta
    parts: list[Part]
    finish_reason: str | None


class ChatRun:
    """The engine's work on one ChatRequest. Use it in a `with` block, whose end aborts what still
    runs. reasoning_tokens: those of all choices up to now."""

    def __init__(self, call: Call, asked: ChatRequest) -> None:
        """Submits the request. Raises OverloadedError, EngineStoppedError, and RequestError for
        tools or a template that the model does not support."""
        engine = self._engine = call.engine
        self._asked = asked
        self._format = engine.chat_format
        self._uses_tools = bool(asked.tools) and asked.tool_choice != "none"
        if self._uses_tools and self._format.tools is None:
            raise RequestError(
                "tools are not supported: the server runs without a tool parser",
                param="tools",
                code="unsupported_parameter",
            )
        structured = asked.params.structured
        # A grammar of the client describes the whole answer, which leaves no room for reasoning.
        self._reasons = self._format.reasoning is not None and (
            structured is None or structured.kind != "grammar"
        )
        self._drops_parts = not (asked.include_reasoning and asked.parallel_tool_calls)
        params = self._params()
        engine.check_grammar_queue(params)
        self._stream = engine.submit_chat(
            asked.messages,
            params,
            request_id=call.request_id,
            client=asked.client,
            policy=call.policy,
            tools=asked.tools if self._uses_tools else None,
            template_kwargs=asked.template_kwargs,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
        )
        self.generation = Generation([self._stream], asked.params.n, call.charge)
        self._parsers: list[Parser] = []
        self.reasoning_tokens = 0

    def __enter__(self) -> Self:
        self.generation.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.generation.__exit__(kind, error, traceback)

    async def accepted(self) -> None:
        """Waits until the prompt is rendered, tokenized and checked. Raises the error of a refused
        one."""
        made_of_tools = self._asked.params.structured is None
        with parameters_named({"structured": "tools"} if made_of_tools else {}):
            await self.generation.accepted()
        if self._uses_tools or self._reasons:
            is_open = await self._is_reasoning_open()
            self._parsers = [self._parser(is_open) for _ in range(self._asked.params.n)]

    @property
    def prompt_tokens(self) -> int:
        return self.generation.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self.generation.cached_tokens

    async def steps(self) -> AsyncGenerator[ChatStep, None]:
        """Yields the steps in order of arrival. Raises for sequences that have failed."""
        parsers = self._parsers
        async with aclosing(self.generation.deltas()) as deltas:
            async for choice, delta in deltas:
                if parsers:
                    yield self._parsed(choice, delta, parsers[choice])
                    continue
                parts: list[Part] = [Text(delta.text)] if delta.text else []
                reason = delta.finish_reason
                yield ChatStep(choice, delta, parts, None if reason is None else reason.value)

    def _params(self) -> SamplingParams:
        """Returns the engine's parameters: markers that are special tokens stay in the text for the
        parsers, and the grammar includes calls and reasoning."""
        style, params = self._format, self._asked.params
        is_counted = params.max_tokens == 0  # no token is generated, so no grammar is needed
        structured = None if is_counted else self._structured()
        if structured is not params.structured:
            params = replace(params, structured=structured)
        markers = style.reasoning.markers if self._reasons and style.reasoning else ()
        if self._uses_tools and style.tools is not None:
            markers += style.tools.markers
        special = tuple(marker for marker in markers if marker in style.special_ids)
        return replace(params, shown_special_tokens=special) if special else params

    def _structured(self) -> StructuredOutput | None:
        """Returns the grammar of the answer. A forced call replaces the client's own format."""
        asked, style = self._asked, self._format
        content, tools, choice = asked.params.structured, asked.tools, asked.tool_choice
        is_bounded = content.bounded if content is not None else asked.bounded_json
        if is_bounded is None:
            is_bounded = self._engine.config.bounded_json
        options = {"is_open": self._will_be_open(), "is_bounded": is_bounded}
        if not self._uses_tools:
            if content is None or not self._reasons:
                return content
            return content_after_reasoning(style, content, **options)
        parallel = asked.parallel_tool_calls
        if isinstance(choice, tuple):
            tools = [tool for tool in tools if tool["function"]["name"] == choice[1]]
            parallel = False
        if choice != "auto":
            return forced_calls(style, tools, parallel=parallel, **options)
        if content is None and not any(tool["function"].get("strict") for tool in tools):
            return None
        return calls_or_content(style, tools, content, parallel=parallel, **options)

    def _parser(self, is_open: bool) -> Parser:
        asked, tools = self._asked, None
        if self._uses_tools:
            functions = [tool["function"] for tool in asked.tools]
            tools = {item["name"]: item.get("parameters", {}) for item in functions}
        num_earlier = sum(len(item.get("tool_calls") or ()) for item in asked.messages)
        return make_parser(
            self._format,
            tools,
            reasons=self._reasons,
            is_open=is_open,
            num_earlier=num_earlier,
        )

    def _will_be_open(self) -> bool:
        """Predicts whether the prompt will end inside the reasoning."""
        asked, style = self._asked, self._format
        if asked.continue_final_message:
            return self._is_continued_inside()
        thinks = bool(asked.template_kwargs.get("enable_thinking", True))
        return style.opens_reasoning and thinks and asked.add_generation_prompt

    def _is_continued_inside(self) -> bool:
        style = self._format.reasoning
        said = str(self._asked.messages[-1].get("content"))
        return style is not None and said.rfind(style.begin) > said.rfind(style.end)

    async def _is_reasoning_open(self) -> bool:
        """Returns whether the prompt ends with the marker that begins the reasoning."""
        style = self._format.reasoning
        if style is None or not self._reasons:
            return False
        if self._asked.continue_final_message:
            return self._is_continued_inside()
        request = await self._stream.accepted()
        tail = list(request.prompt_token_ids[-_TAIL_TOKENS:])
        text = self._engine.tokenizer.decode(tail, skip_special_tokens=False)
        return text.rstrip().endswith(style.begin)

    def _parsed(self, choice: int, delta: TokenDelta, parser: Parser) -> ChatStep:
        had_reasoned = parser.has_reasoned
        parts = parser.push(delta.text)
        reason = delta.finish_reason
        if self._reasons and not had_reasoned:
            self.reasoning_tokens += self._num_reasoning(delta, parser, parts)
        if reason is not None:
            parts += parser.finish()
        if self._drops_parts:
            parts = [part for part in parts if self._is_wanted(part)]
        if reason is None:
            return ChatStep(choice, delta, parts, None)
        is_call = parser.num_calls > 0 and reason is FinishReason.STOP
        return ChatStep(choice, delta, parts, "tool_calls" if is_call else reason.value)

    def _is_wanted(self, part: Part) -> bool:
        match part:
            case Reasoning():
                return self._asked.include_reasoning
            case ToolCallStart(number) | ToolCallArguments(number):
                return number == 0 or self._asked.parallel_tool_calls
        return True

    def _num_reasoning(self, delta: TokenDelta, parser: Parser, parts: list[Part]) -> int:
        """Returns how many tokens of the delta are reasoning, markers included. The reasoning had
        not ended before the delta."""
        ids = delta.token_ids
        if parser.is_reasoning:
            return len(ids)
        if not parser.has_reasoned:
            return 0
        style, text = self._format, delta.text
        assert style.reasoning is not None
        if style.reasoning_end_id is not None and style.reasoning_end_id in ids:
            return ids.index(style.reasoning_end_id) + 1
        # the end marker is several tokens, somewhere in the delta
        before, end, _ = text.partition(style.reasoning.end)
        thought = sum(len(part.text) for part in parts if isinstance(part, Reasoning))
        size = len(before + end) if end else thought or len(text)
        return round(len(ids) * size / len(text))
