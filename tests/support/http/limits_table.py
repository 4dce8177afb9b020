"""The limits on everything that clients can send, for docs/operations.md.

`python -m tests.support.http.limits_table` writes the tables. A row names the constant that the
parser uses, so the page cannot show another number; a test looks for constants without a row.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple

from serve.http.edge.settings import HttpSettings

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"
BEGIN, END = "<!-- limits: tests/support/http/limits_table.py -->\n", "<!-- end of limits -->\n"
HTTP = "serve.http."
COUNT, SIZE, SECONDS, CHARS, TOKENS = "count", "size", "s", "characters", "tokens"


class Limit(NamedTuple):
    """A limit. what: the bounded thing; constant: "module:NAME"; beyond: what happens beyond it;
    setting: its setting, if any."""

    what: str
    constant: str
    unit: str
    beyond: str
    setting: str = ""

    @property
    def value(self) -> float:
        module, _, name = self.constant.partition(":")
        number = getattr(importlib.import_module(module), name)
        assert isinstance(number, int | float), self.constant
        return number


_LIMITS, _SAMPLING = HTTP + "edge.limits:", "serve.sampling_params:"
_LONG, _MANY = "400 `string_above_max_length`", "400 `array_above_max_length`"
_VALUE = "400 `invalid_value`"
_LATE = "408 `request_timeout`, closed"

HEAD = (
    Limit("request line, or one header", _LIMITS + "LINE_BYTES", SIZE, "431, closed"),
    Limit("headers", _LIMITS + "HEADERS", COUNT, "431, closed"),
    Limit("head that is not complete", _LIMITS + "HEAD_BYTES", SIZE, "431, closed"),
    Limit("head, from its first byte on", _LIMITS + "HEAD_S", SECONDS, _LATE, "head_timeout_s"),
    Limit(
        "silence of a new connection",
        _LIMITS + "FIRST_REQUEST_S",
        SECONDS,
        "closed",
        "first_request_timeout_s",
    ),
    Limit("TLS handshake", _LIMITS + "TLS_HANDSHAKE_S", SECONDS, "closed"),
    Limit(
        "client's `X-Request-Id`", _LIMITS + "CLIENT_REQUEST_ID_CHARS", CHARS, "it is not echoed"
    ),
)
BODY = (
    Limit("body", _LIMITS + "BODY_BYTES", SIZE, "413, closed, unread", "max_body_bytes"),
    Limit(
        "bodies in memory",
        _LIMITS + "BODIES_BYTES",
        SIZE,
        "429 `overloaded`, closed",
        "max_bodies_bytes",
    ),
    Limit("body, to its end", _LIMITS + "BODY_S", SECONDS, _LATE, "body_timeout_s"),
    Limit("slowest body, per second", _LIMITS + "BODY_MIN_RATE", SIZE, _LATE, "body_min_rate"),
    Limit("grace before that", _LIMITS + "BODY_GRACE_S", SECONDS, ""),
    Limit("JSON: depth", _LIMITS + "JSON_DEPTH", COUNT, "400 `invalid_json`"),
    Limit("JSON: values", _LIMITS + "JSON_VALUES", COUNT, "400 `invalid_json`"),
    Limit("JSON: objects and lists", _LIMITS + "JSON_CONTAINERS", COUNT, "400 `invalid_json`"),
    Limit("JSON: characters of a whole number", _LIMITS + "INTEGER_CHARS", COUNT, _VALUE),
    Limit(
        "body that is parsed in the event loop",
        _LIMITS + "PARSE_INLINE_BYTES",
        SIZE,
        "a thread parses it",
        "parse_inline_bytes",
    ),
)
CONNECTIONS = (
    Limit(
        "connections",
        _LIMITS + "CONNECTIONS",
        COUNT,
        "429 `too_many_connections`, closed; health is answered",
        "max_connections",
    ),
    Limit(
        "connections of another machine's address",
        _LIMITS + "CONNECTIONS_PER_ADDRESS",
        COUNT,
        "429 `too_many_connections`, closed",
        "max_connections_per_address",
    ),
    Limit("connections not yet accepted", _LIMITS + "BACKLOG", COUNT, "the kernel's", "backlog"),
    Limit("requests on a connection, unanswered", _LIMITS + "PIPELINED", COUNT, "reading pauses"),
    Limit("idle connection", _LIMITS + "KEEPALIVE_S", SECONDS, "closed", "keepalive_s"),
    Limit("requests being answered", _LIMITS + "CALLS", COUNT, "429 `overloaded`", "max_calls"),
    Limit(
        "request, to the end of its answer",
        _LIMITS + "REQUEST_S",
        SECONDS,
        "504 `generation_timeout`; in a stream the last event",
        "request_timeout_s",
    ),
    Limit(
        "reader that takes nothing",
        _LIMITS + "WRITE_S",
        SECONDS,
        "aborted",
        "write_timeout_s",
    ),
    Limit(
        "peer that acknowledges nothing",
        _LIMITS + "WRITE_S",
        SECONDS,
        "closed by the kernel",
        "write_timeout_s",
    ),
    Limit("silence of a connection too many", HTTP + "edge.connection:SPARE_S", SECONDS, "closed"),
    Limit(
        "kernel's buffer of a stream",
        _LIMITS + "SEND_BUFFER_BYTES",
        SIZE,
        "the stream waits",
        "send_buffer_bytes",
    ),
    Limit("watchers of the live view", HTTP + "monitoring.live:MAX_WATCHERS", COUNT, "429"),
)
SAMPLING = (
    Limit("n", _SAMPLING + "MAX_N", COUNT, _VALUE),
    Limit("best_of", HTTP + "openai.requests:MAX_BEST_OF", COUNT, _VALUE),
    Limit("prompts times n", HTTP + "openai.requests:MAX_SEQUENCES", COUNT, _MANY),
    Limit(
        "max_tokens", HTTP + "calls.sampling_fields:MAX_TOKENS", COUNT, "400, the context's length"
    ),
    Limit("stop strings", _SAMPLING + "MAX_STOP_STRINGS", COUNT, _MANY),
    Limit("one stop string", _SAMPLING + "MAX_STOP_LENGTH", CHARS, _LONG),
    Limit("stop_token_ids", _SAMPLING + "MAX_STOP_TOKEN_IDS", COUNT, _MANY),
    Limit("logit_bias", _SAMPLING + "MAX_LOGIT_BIAS", COUNT, _MANY),
    Limit("allowed_token_ids", HTTP + "calls.sampling_fields:MAX_ALLOWED_TOKEN_IDS", COUNT, _MANY),
    Limit("prompts times allowed_token_ids", _LIMITS + "ALLOWED_IDS", COUNT, _MANY),
    Limit("bad_words", _SAMPLING + "MAX_BAD_WORDS", COUNT, _MANY),
    Limit("one bad word", _SAMPLING + "MAX_BAD_WORD_LENGTH", CHARS, _LONG),
    Limit("logprobs", HTTP + "openai.requests:MAX_COMPLETION_LOGPROBS", COUNT, _VALUE),
    Limit("top_logprobs", HTTP + "openai.requests:MAX_TOP_LOGPROBS", COUNT, _VALUE),
    Limit("n x max_tokens x (1 + top_logprobs), in all", _LIMITS + "LOGPROBS", COUNT, _VALUE),
    Limit(
        "prompt_logprobs, in all",
        HTTP + "openai.completion_writer:MAX_PROMPT_LOGPROBS",
        COUNT,
        _VALUE,
    ),
    Limit(
        "prompt tokens that are repeated, in all",
        HTTP + "openai.completion_writer:MAX_REPEATED_TOKENS",
        COUNT,
        _VALUE,
    ),
    Limit("metadata", HTTP + "calls.sampling_fields:MAX_METADATA", COUNT, _MANY),
    Limit("user and other names", HTTP + "calls.sampling_fields:MAX_CLIENT_CHARS", CHARS, _LONG),
    Limit("other strings", HTTP + "schema.fields:MAX_NAME_CHARS", CHARS, _LONG),
    Limit("a token's id", HTTP + "schema.fields:MAX_TOKEN_ID", COUNT, _VALUE),
)
PROMPTS = (
    Limit("prompts", HTTP + "openai.prompts:MAX_PROMPTS", COUNT, _MANY),
    Limit("one prompt", HTTP + "openai.prompts:MAX_PROMPT_CHARS", CHARS, _LONG),
    Limit("one prompt", HTTP + "openai.prompts:MAX_PROMPT_TOKENS", TOKENS, _MANY),
    Limit("inputs of embeddings", HTTP + "openai.embeddings_endpoint:MAX_INPUTS", COUNT, _MANY),
    Limit("text to tokenize", HTTP + "openai.tokenize_endpoint:MAX_TEXT_CHARS", CHARS, _LONG),
    Limit("tokens to detokenize", HTTP + "openai.tokenize_endpoint:MAX_TOKENS", COUNT, _MANY),
    Limit("messages", HTTP + "calls.messages:MAX_MESSAGES", COUNT, _MANY),
    Limit("text of a message", HTTP + "calls.messages:MAX_TEXT_CHARS", CHARS, _LONG),
    Limit("name in a message", HTTP + "calls.messages:MAX_NAME_CHARS", CHARS, _LONG),
    Limit("tool calls of a message", HTTP + "calls.messages:MAX_TOOL_CALLS", COUNT, _MANY),
    Limit("id of a tool call", HTTP + "calls.messages:MAX_CALL_ID_CHARS", CHARS, _LONG),
    Limit(
        "depth of a call's arguments", HTTP + "calls.messages:MAX_ARGUMENTS_DEPTH", COUNT, _VALUE
    ),
    Limit("chat_template_kwargs", HTTP + "calls.conversation:MAX_TEMPLATE_KWARGS", COUNT, _MANY),
    Limit("one of them", HTTP + "calls.conversation:MAX_KWARG_CHARS", CHARS, _LONG),
    Limit("one of them, as a number", HTTP + "calls.conversation:MAX_KWARG_INTEGER", COUNT, _VALUE),
    Limit("Anthropic: text", HTTP + "anthropic.blocks:MAX_TEXT_CHARS", CHARS, _LONG),
    Limit("Anthropic: blocks of a message", HTTP + "anthropic.blocks:MAX_BLOCKS", COUNT, _MANY),
    Limit("Anthropic: input of a tool", HTTP + "anthropic.blocks:MAX_ARGUMENT_BYTES", SIZE, _LONG),
    Limit("Anthropic: ids", HTTP + "anthropic.blocks:MAX_ID_CHARS", CHARS, _LONG),
    Limit("Responses: text", HTTP + "responses.items:MAX_TEXT_CHARS", CHARS, _LONG),
    Limit(
        "Responses: items, with those before", HTTP + "calls.messages:MAX_MESSAGES", COUNT, _MANY
    ),
    Limit("Responses: parts of an item", HTTP + "responses.items:MAX_PARTS", COUNT, _MANY),
    Limit(
        "Responses: instructions",
        HTTP + "responses.requests:MAX_INSTRUCTIONS_CHARS",
        CHARS,
        _LONG,
    ),
    Limit("Responses: a listing", HTTP + "responses.listing:MAX_LIMIT", COUNT, _VALUE),
    Limit("Responses: ids", HTTP + "responses.items:MAX_ID_CHARS", CHARS, _LONG),
)
SHAPES = (
    Limit("tools", HTTP + "calls.tools:MAX_TOOLS", COUNT, _MANY),
    Limit("all tools, as JSON", HTTP + "calls.tools:MAX_TOOLS_BYTES", SIZE, _VALUE),
    Limit("schema of a tool", HTTP + "calls.tools:MAX_SCHEMA_BYTES", SIZE, _VALUE),
    Limit("its depth", HTTP + "calls.tools:MAX_SCHEMA_DEPTH", COUNT, _VALUE),
    Limit("a pattern in it", HTTP + "calls.tools:MAX_PATTERN_CHARS", CHARS, _VALUE),
    Limit("description of a tool", HTTP + "calls.tools:MAX_DESCRIPTION_CHARS", CHARS, _LONG),
    Limit("schema of an answer", HTTP + "calls.structured_fields:MAX_SCHEMA_BYTES", SIZE, _VALUE),
    Limit("guided_grammar", HTTP + "calls.structured_fields:MAX_GRAMMAR_CHARS", CHARS, _LONG),
    Limit("guided_regex", HTTP + "calls.structured_fields:MAX_REGEX_CHARS", CHARS, _LONG),
    Limit("guided_choice", HTTP + "calls.structured_fields:MAX_CHOICES", COUNT, _MANY),
    Limit("one choice", HTTP + "calls.structured_fields:MAX_CHOICE_CHARS", CHARS, _LONG),
)
TABLE: dict[str, tuple[Limit, ...]] = {
    "The head of a request": HEAD,
    "Its body": BODY,
    "Connections, queue and time": CONNECTIONS,
    "Sampling": SAMPLING,
    "Prompts and messages": PROMPTS,
    "Tools and structured output": SHAPES,
}


def default_of(limit: Limit) -> float | None:
    """Returns the default of the limit's setting, if it has one."""
    return getattr(HttpSettings(), limit.setting) if limit.setting else None


def markdown() -> str:
    """The tables of docs/operations.md."""
    lines: list[str] = []
    for title, limits in TABLE.items():
        lines += [f"\n### {title}\n", "| of | at most | beyond it | setting |", "|---|---|---|---|"]
        for limit in limits:
            setting = f"`{limit.setting}`" if limit.setting else ""
            lines.append(f"| {limit.what} | {_spelled(limit)} | {limit.beyond} | {setting} |")
    return "\n".join(lines) + "\n\n"


def _spelled(limit: Limit) -> str:
    value = limit.value
    if limit.unit == SIZE and value % 1024 == 0:
        return f"{value / (1 << 20):g} MiB" if value % (1 << 20) == 0 else f"{value / 1024:g} KiB"
    if limit.unit == COUNT:
        return f"{value:,}"
    return f"{value:,.15g} {'bytes' if limit.unit == SIZE else limit.unit}"


def with_table(page: str) -> str:
    """Returns the page with the current tables."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + markdown() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
