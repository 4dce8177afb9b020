"""How a model answers one ChatRequest: parameters of the engine, variables of the template, and
the readers of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from serve.chat.answer_reader import AnswerReader
from serve.chat.reasoning import BUDGET, ReasoningOptions, plan_reasoning
from serve.chat.request import ChatRequest
from serve.errors import RequestError
from serve.sampling_params import SamplingParams
from serve.structured_output import StructuredOutput
from serve.text.chat_parser import ChatFormat, Parser, make_parser
from serve.text.chat_parser.grammar import calls_or_content, content_after_reasoning, forced_calls
from serve.text.reasoning_prompt import is_reasoning_open
from serve.text.tokenizer import Tokenizer


class AnswerPlan:
    """The plan of one request. params: the engine's parameters. tools: those that the prompt
    shows. template_kwargs: all variables of the template."""

    def __init__(
        self,
        asked: ChatRequest,
        style: ChatFormat,
        *,
        template: str = "",
        bounded_json: bool = True,
        reasoning_budget: int | None = None,
    ) -> None:
        """style: the formats of the model. template: the text of its chat template. bounded_json,
        reasoning_budget: the engine's settings, for requests that do not say. Raises RequestError
        for tools and bounds that the model does not support."""
        self._asked = asked
        self._format = style
        self._bounded_json = bounded_json
        self.uses_tools = bool(asked.tools) and asked.tool_choice != "none"
        if self.uses_tools and style.tools is None:
            raise RequestError(
                "tools are not supported: the server runs without a tool parser",
                param="tools",
                code="unsupported_parameter",
            )
        self.tools = asked.tools if self.uses_tools else None
        structured = asked.params.structured
        # A grammar of the client describes the whole answer, which leaves no room for reasoning.
        self.reasons = style.reasoning is not None and (
            structured is None or structured.kind != "grammar"
        )
        options = self._options = _with_bound(asked)
        plan = plan_reasoning(options, asked.template_kwargs, template, reasoning_budget)
        self.template_kwargs = plan.template_kwargs
        self._check_bound()
        self.params = self._params(plan.max_tokens if self.reasons else None)

    @property
    def is_read(self) -> bool:
        """Whether the answer needs readers; else all of its text is content."""
        return self.uses_tools or self.reasons

    @property
    def structured_by_tools(self) -> bool:
        """Whether a grammar of the engine's parameters can come from the tools only."""
        return self._asked.params.structured is None

    def readers(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> list[AnswerReader]:
        """Returns a reader for each of the n answers to this prompt."""
        is_open = self._is_open(tokenizer, prompt_token_ids)
        return [
            AnswerReader(
                self._parser(is_open),
                self._format,
                counts_reasoning=self.reasons,
                include_reasoning=self._asked.include_reasoning,
                parallel_tool_calls=self._asked.parallel_tool_calls,
            )
            for _ in range(self._asked.params.n)
        ]

    def _check_bound(self) -> None:
        options = self._options
        is_bound = options.max_tokens is not None and options.max_tokens >= 0
        if is_bound and options.param is not None and self._format.reasoning is None:
            raise RequestError(
                f"{options.param} is not supported: the model has no reasoning that is marked",
                param=options.param,
                code="unsupported_parameter",
            )

    def _params(self, max_reasoning: int | None) -> SamplingParams:
        """Returns the engine's parameters: markers that are special tokens stay in the text for the
        parsers, and the grammar includes calls and reasoning."""
        style, asked = self._format, self._asked
        params = replace(asked.params, thinking_token_budget=max_reasoning)
        is_counted = params.max_tokens == 0  # no token is generated, so no grammar is needed
        structured = None if is_counted else self._structured()
        if structured is not params.structured:
            params = replace(params, structured=structured)
        if max_reasoning is not None and asked.continue_final_message:
            params = replace(params, is_reasoning_open=self._is_continued_inside())
        markers = style.reasoning.markers if self.reasons and style.reasoning else ()
        if self.uses_tools and style.tools is not None:
            markers += style.tools.markers
        special = tuple(marker for marker in markers if marker in style.special_ids)
        return replace(params, shown_special_tokens=special) if special else params

    def _structured(self) -> StructuredOutput | None:
        """Returns the grammar of the answer. A forced call replaces the client's own format."""
        asked, style = self._asked, self._format
        content, tools, choice = asked.params.structured, asked.tools, asked.tool_choice
        is_bounded = content.bounded if content is not None else asked.bounded_json
        if is_bounded is None:
            is_bounded = self._bounded_json
        options: dict[str, Any] = {"is_bounded": is_bounded}
        if asked.continue_final_message:  # else the end of the rendered prompt says
            options["is_open"] = self._is_continued_inside()
        if not self.uses_tools:
            if content is None or not self.reasons:
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
        if self.uses_tools:
            functions = [tool["function"] for tool in asked.tools]
            tools = {item["name"]: item.get("parameters", {}) for item in functions}
        num_earlier = sum(len(item.get("tool_calls") or ()) for item in asked.messages)
        return make_parser(
            self._format, tools, reasons=self.reasons, is_open=is_open, num_earlier=num_earlier
        )

    def _is_continued_inside(self) -> bool:
        style = self._format.reasoning
        said = str(self._asked.messages[-1].get("content"))
        return style is not None and said.rfind(style.begin) > said.rfind(style.end)

    def _is_open(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bool:
        """Returns whether the prompt ends inside the reasoning."""
        style = self._format.reasoning
        if style is None or not self.reasons:
            return False
        if self._asked.continue_final_message:
            return self._is_continued_inside()
        return is_reasoning_open(tokenizer, style, prompt_token_ids)


def _with_bound(asked: ChatRequest) -> ReasoningOptions:
    """Returns the request's options, with the bound of its parameters if they have one."""
    options, budget = asked.reasoning, asked.params.thinking_token_budget
    if options.max_tokens is not None or budget is None:
        return options
    return replace(options, max_tokens=budget, param=BUDGET)
