"""Turns a conversation into token ids with the model's chat template.

Tools are rendered by the template or described in text, and what clients wrote cannot bring in
special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from serve.config import EngineConfig
from serve.engine.request_limits import RequestLimits, check_text
from serve.errors import RequestError
from serve.structured.reasoning_limit import ReasoningEnd
from serve.text.chat_parser import ChatFormat, choose_format
from serve.text.chat_parser.description import describe_tools
from serve.text.chat_parser.syntax.stored_calls import (
    drop_thinking,
    name_arguments,
    with_thinking,
    write_arguments,
)
from serve.text.chat_template import (
    CONTINUE,
    ChatTemplate,
    neutralize,
    neutralize_value,
    split_neutralized,
)
from serve.text.tokenizer import Tokenizer
from serve.text.tokenizer_config import TextConfig


def make_chat_template(source: Tokenizer | TextConfig) -> ChatTemplate | None:
    """Returns the model's chat template, if it has one. Its worker process starts now and reads
    the named tokens at the first use."""
    if source.chat_template is None:
        return None
    return ChatTemplate(
        source.chat_template,
        special_tokens=source.named_tokens,
        tool_source=source.tool_template,
    )


def make_chat_format(tokenizer: Tokenizer, config: EngineConfig) -> ChatFormat:
    """Returns the format of reasoning and tool calls in the model's answers, which the template and
    the settings determine."""
    style = choose_format(
        f"{tokenizer.tool_template or ''}{tokenizer.chat_template or ''}",
        config.tool_parser,
        config.reasoning_parser,
    )
    markers: tuple[str, ...] = ()
    begins: list[str] = []
    end_id = None
    if style.tools is not None:
        markers += style.tools.markers
        candidates = (style.tools.begin, *style.tools.also_begin)
        begins = [text for text in candidates if _is_token(tokenizer, text)]
    if style.reasoning is not None:
        markers += style.reasoning.markers
        token_ids = tokenizer.encode(style.reasoning.end, add_special_tokens=False)
        end_id = token_ids[0] if len(token_ids) == 1 else None
    ids = tokenizer.special_token_ids
    special = {marker: ids[marker] for marker in markers if marker in ids}
    return replace(style, special_ids=special, reasoning_end_id=end_id, call_begins=tuple(begins))


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    return len(tokenizer.encode(text, add_special_tokens=False)) == 1


def reasoning_end(tokenizer: Tokenizer, config: EngineConfig) -> ReasoningEnd | None:
    """Returns how the model's reasoning is ended; None if the model has none that is marked."""
    style = make_chat_format(tokenizer, config)
    if style.reasoning is None:
        return None
    return ReasoningEnd(style, config.reasoning_budget_message)


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    limits: RequestLimits,
    add_generation_prompt: bool = True,
    *,
    style: ChatFormat | None = None,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> list[int]:
    """Returns the token ids of a conversation. Special tokens come from the template only, never
    from a client's text. Raises RequestError for a conversation that the template refuses."""
    _check_size(messages, tokenizer, limits)
    if style is not None and style.has_native_calls and style.tools is not None:
        fit_ids = style.tools.fit_ids
        messages = messages if fit_ids is None else fit_ids(messages)
    messages = with_thinking(messages, template.source)
    special = tokenizer.special_token_strings
    safe = neutralize(messages, special)
    tools = neutralize_value(tools, special) or None
    if style is not None and not style.has_native_tools:
        # after the clients' texts are safe, so that markers of the description are special tokens
        safe, tools = describe_tools(safe, tools, template.source, style), None
    if continue_final_message:
        safe[-1]["content"] = f"{safe[-1]['content']}{CONTINUE}"
    options: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "tools": tools,
        "extra": neutralize_value(dict(template_kwargs or {}), special),
    }
    text = _render(template, safe, options)
    if continue_final_message:
        text = _continued(text)
    parts = split_neutralized(text)
    check_text("".join(parts), tokenizer, limits)
    token_ids: list[int] = []
    for part in parts:
        token_ids.extend(tokenizer.encode(part, add_special_tokens=False))
    return token_ids


def num_chars(value: Any) -> int:
    """Returns the number of characters of the texts in a JSON value, such as messages."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(num_chars, value.values()))
    return sum(map(num_chars, value)) if isinstance(value, (list, tuple)) else 0


def _render(template: ChatTemplate, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Renders the messages, and what a template refuses in other forms that it may take."""
    try:
        return template.render(messages, **options)
    except RequestError as error:
        refusal = error
    for change in (name_arguments, write_arguments, drop_thinking):
        if change(messages):
            with suppress(RequestError):
                return template.render(messages, **options)
    raise refusal


def _check_size(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, limits: RequestLimits
) -> None:
    """Refuses a text that cannot fit before the one rendering process spends time on it."""
    texts = [text for item in messages if isinstance(text := item.get("content"), str)]
    check_text(max(texts, key=len, default=""), tokenizer, limits)


def _continued(text: str) -> str:
    """Returns the text up to the end of the last message's content."""
    before, found, _ = text.rpartition(CONTINUE)
    if not found:
        raise RequestError(
            "the chat template does not show the last message, so it cannot be continued",
            param="continue_final_message",
        )
    return before.replace(CONTINUE, "")
