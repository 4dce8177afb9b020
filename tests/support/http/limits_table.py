"""Makes the tables in docs/operations.md of the limits on what clients can send.

`python -m tests.support.http.limits_table` writes the tables. A row names the constant that the
parser uses, so the page always shows the real value. A test finds constants without a row.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple

from serve.http.edge.settings import HttpSettings

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"
BEGIN, END = "<!-- limits: tests/support/http/limits_table.py -->\n", "<!-- end of limits -->\n"
COUNT, SIZE, SECONDS, CHARS, TOKENS = "count", "size", "s", "characters", "tokens"


class Limit(NamedTuple):
    """A limit on the input of clients.

    what: the limited quantity; constant: "module:NAME"; beyond: what happens beyond the limit;
    setting: the HTTP setting that changes the limit, if any.
    """

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


_SAMPLING = "serve.sampling_params:"
_LONG, _MANY = "400 `string_above_max_length`", "400 `array_above_max_length`"
_VALUE = "400 `invalid_value`"
_LATE = "408 `request_timeout`, closed"


def _http(what: str, constant: str, unit: str, beyond: str, setting: str = "") -> Limit:
    return Limit(what, f"serve.http.{constant}", unit, beyond, setting)


def _chat(what: str, constant: str, unit: str, beyond: str) -> Limit:
    return Limit(what, f"serve.chat.{constant}", unit, beyond)


HEAD = (
    _http("length of the request line or a header", "edge.limits:LINE_BYTES", SIZE, "431, closed"),
    _http("number of headers", "edge.limits:HEADERS", COUNT, "431, closed"),
    _http("size of an incomplete head", "edge.limits:HEAD_BYTES", SIZE, "431, closed"),
    _http(
        "time of a head from its first byte", "edge.limits:HEAD_S", SECONDS, _LATE, "head_timeout_s"
    ),
    _http(
        "time until the first head",
        "edge.limits:FIRST_REQUEST_S",
        SECONDS,
        "closed",
        "first_request_timeout_s",
    ),
    _http("time of the TLS handshake", "edge.limits:TLS_HANDSHAKE_S", SECONDS, "closed"),
    _http(
        "length of the client's `X-Request-Id`",
        "edge.limits:CLIENT_REQUEST_ID_CHARS",
        CHARS,
        "the header is not echoed",
    ),
)
BODY = (
    _http(
        "size of a body",
        "edge.limits:BODY_BYTES",
        SIZE,
        "413 before it is read, closed",
        "max_body_bytes",
    ),
    _http(
        "size of all bodies in memory",
        "edge.limits:BODIES_BYTES",
        SIZE,
        "429 `overloaded`, closed",
        "max_bodies_bytes",
    ),
    _http(
        "[expected memory](#memory-of-large-calls) of all calls",
        "edge.limits:WORK_BYTES",
        SIZE,
        "429 `memory_budget`; 400 `request_too_large` for a call that would not fit alone",
        "max_work_bytes",
    ),
    _http("time until the end of a body", "edge.limits:BODY_S", SECONDS, _LATE, "body_timeout_s"),
    _http(
        "minimum rate of a body, per second",
        "edge.limits:BODY_MIN_RATE",
        SIZE,
        _LATE,
        "body_min_rate",
    ),
    _http("time before the minimum rate applies", "edge.limits:BODY_GRACE_S", SECONDS, ""),
    _http("depth of JSON", "edge.limits:JSON_DEPTH", COUNT, "400 `invalid_json`"),
    _http("values in JSON", "edge.limits:JSON_VALUES", COUNT, "400 `invalid_json`"),
    _http("objects and lists in JSON", "edge.limits:JSON_CONTAINERS", COUNT, "400 `invalid_json`"),
    _http("characters of an integer in JSON", "edge.limits:INTEGER_CHARS", COUNT, _VALUE),
    _http(
        "size of a body that the event loop parses",
        "edge.limits:PARSE_INLINE_BYTES",
        SIZE,
        "a thread parses it",
        "parse_inline_bytes",
    ),
)
CONNECTIONS = (
    _http(
        "connections",
        "edge.limits:CONNECTIONS",
        COUNT,
        "429 `too_many_connections`, closed, except health checks",
        "max_connections",
    ),
    _http(
        "connections from an address of another machine",
        "edge.limits:CONNECTIONS_PER_ADDRESS",
        COUNT,
        "429 `too_many_connections`, closed",
        "max_connections_per_address",
    ),
    _http(
        "connections that are not yet accepted",
        "edge.limits:BACKLOG",
        COUNT,
        "the kernel decides",
        "backlog",
    ),
    _http("unanswered requests on a connection", "edge.limits:PIPELINED", COUNT, "reading pauses"),
    _http("idle time of a connection", "edge.limits:KEEPALIVE_S", SECONDS, "closed", "keepalive_s"),
    _http("requests in progress", "edge.limits:CALLS", COUNT, "429 `overloaded`", "max_calls"),
    _http(
        "time from a request to the end of its answer",
        "edge.limits:REQUEST_S",
        SECONDS,
        "504 `generation_timeout`, in a stream as its last event",
        "request_timeout_s",
    ),
    _http(
        "time in which a reader makes no progress",
        "edge.limits:WRITE_S",
        SECONDS,
        "the request is aborted",
        "write_timeout_s",
    ),
    _http(
        "time in which a peer acknowledges no data",
        "edge.limits:WRITE_S",
        SECONDS,
        "the kernel closes the connection",
        "write_timeout_s",
    ),
    _http(
        "time until the first head of a connection above the limit",
        "edge.connection:SPARE_S",
        SECONDS,
        "closed",
    ),
    _http(
        "size of the kernel's send buffer of a stream",
        "edge.limits:SEND_BUFFER_BYTES",
        SIZE,
        "the stream waits",
        "send_buffer_bytes",
    ),
    _http("watchers of the live view", "monitoring.live:MAX_WATCHERS", COUNT, "429"),
)
SAMPLING = (
    Limit("`n`", _SAMPLING + "MAX_N", COUNT, _VALUE),
    _http("`best_of`", "openai.requests:MAX_BEST_OF", COUNT, _VALUE),
    _http("prompts times `n`", "openai.requests:MAX_SEQUENCES", COUNT, _MANY),
    _http(
        "`max_tokens`",
        "calls.sampling_fields:MAX_TOKENS",
        COUNT,
        "400; the context is the real limit",
    ),
    Limit("stop strings", _SAMPLING + "MAX_STOP_STRINGS", COUNT, _MANY),
    Limit("length of a stop string", _SAMPLING + "MAX_STOP_LENGTH", CHARS, _LONG),
    Limit("`stop_token_ids`", _SAMPLING + "MAX_STOP_TOKEN_IDS", COUNT, _MANY),
    Limit("entries of `logit_bias`", _SAMPLING + "MAX_LOGIT_BIAS", COUNT, _MANY),
    _http("`allowed_token_ids`", "calls.sampling_fields:MAX_ALLOWED_TOKEN_IDS", COUNT, _MANY),
    _http("prompts times `allowed_token_ids`", "edge.limits:ALLOWED_IDS", COUNT, _MANY),
    Limit("`bad_words`", _SAMPLING + "MAX_BAD_WORDS", COUNT, _MANY),
    Limit("length of a bad word", _SAMPLING + "MAX_BAD_WORD_LENGTH", CHARS, _LONG),
    _http("parts of `prediction.content`", "openai.requests:MAX_PREDICTION_PARTS", COUNT, _MANY),
    _http("`logprobs`", "openai.requests:MAX_COMPLETION_LOGPROBS", COUNT, _VALUE),
    _http("`top_logprobs`", "openai.requests:MAX_TOP_LOGPROBS", COUNT, _VALUE),
    _http("a bound on reasoning", "calls.reasoning_fields:MAX_BUDGET", TOKENS, _VALUE),
    _http("`n` x `max_tokens` x (1 + `top_logprobs`)", "edge.limits:LOGPROBS", COUNT, _VALUE),
    _http(
        "`prompt_logprobs` in an answer",
        "openai.completion_writer:MAX_PROMPT_LOGPROBS",
        COUNT,
        _VALUE,
    ),
    _http(
        "echoed prompt tokens in an answer",
        "openai.completion_writer:MAX_REPEATED_TOKENS",
        COUNT,
        _VALUE,
    ),
    _http("entries of `metadata`", "calls.sampling_fields:MAX_METADATA", COUNT, _MANY),
    _http("size of `client_metadata`", "responses.requests:MAX_METADATA_BYTES", SIZE, _VALUE),
    _http(
        "length of `user` and other names of the client",
        "calls.sampling_fields:MAX_CLIENT_CHARS",
        CHARS,
        _LONG,
    ),
    _http("length of other strings", "schema.fields:MAX_NAME_CHARS", CHARS, _LONG),
    _http("token id", "schema.fields:MAX_TOKEN_ID", COUNT, _VALUE),
)
PROMPTS = (
    _http("prompts", "openai.prompts:MAX_PROMPTS", COUNT, _MANY),
    _http("length of a prompt", "openai.prompts:MAX_PROMPT_CHARS", CHARS, _LONG),
    _http("length of a prompt", "openai.prompts:MAX_PROMPT_TOKENS", TOKENS, _MANY),
    _http("inputs of an embeddings request", "openai.embeddings_endpoint:MAX_INPUTS", COUNT, _MANY),
    _http("length of a text to tokenize", "openai.tokenize_endpoint:MAX_TEXT_CHARS", CHARS, _LONG),
    _http("tokens to detokenize", "openai.tokenize_endpoint:MAX_TOKENS", COUNT, _MANY),
    _http("messages", "calls.messages:MAX_MESSAGES", COUNT, _MANY),
    _http(
        "prompts of a continuation",
        "calls.continuation:MAX_REQUESTS",
        COUNT,
        "400 `invalid_continuation`",
    ),
    _http("length of the text of a message", "calls.messages:MAX_TEXT_CHARS", CHARS, _LONG),
    _http("length of a name in a message", "calls.messages:MAX_NAME_CHARS", CHARS, _LONG),
    _http("tool calls of a message", "calls.messages:MAX_TOOL_CALLS", COUNT, _MANY),
    _http("length of the id of a tool call", "calls.messages:MAX_CALL_ID_CHARS", CHARS, _LONG),
    _http(
        "depth of the arguments of a tool call", "calls.messages:MAX_ARGUMENTS_DEPTH", COUNT, _VALUE
    ),
    _chat("entries of `chat_template_kwargs`", "template_kwargs:MAX_TEMPLATE_KWARGS", COUNT, _MANY),
    _chat(
        "length of a string in `chat_template_kwargs`",
        "template_kwargs:MAX_KWARG_CHARS",
        CHARS,
        _LONG,
    ),
    _chat(
        "absolute value of a number in `chat_template_kwargs`",
        "template_kwargs:MAX_KWARG_INTEGER",
        COUNT,
        _VALUE,
    ),
    _http("Anthropic: length of a text", "anthropic.blocks:MAX_TEXT_CHARS", CHARS, _LONG),
    _http("Anthropic: blocks of a message", "anthropic.blocks:MAX_BLOCKS", COUNT, _MANY),
    _http(
        "Anthropic: size of the input of a tool", "anthropic.blocks:MAX_ARGUMENT_BYTES", SIZE, _LONG
    ),
    _http("Anthropic: length of an id", "anthropic.blocks:MAX_ID_CHARS", CHARS, _LONG),
    _http("Responses: length of a text", "responses.items:MAX_TEXT_CHARS", CHARS, _LONG),
    _http("Responses: items of a conversation", "calls.messages:MAX_MESSAGES", COUNT, _MANY),
    _http("Responses: parts of an item", "responses.items:MAX_PARTS", COUNT, _MANY),
    _http(
        "Responses: length of `instructions`",
        "responses.requests:MAX_INSTRUCTIONS_CHARS",
        CHARS,
        _LONG,
    ),
    _http("Responses: items of a listing", "responses.listing:MAX_LIMIT", COUNT, _VALUE),
    _http("Responses: length of an id", "responses.items:MAX_ID_CHARS", CHARS, _LONG),
)
SHAPES = (
    _chat("tools", "tools:MAX_TOOLS", COUNT, _MANY),
    _chat("length of a tool's name", "tools:MAX_NAME_CHARS", CHARS, _VALUE),
    _chat("size of all tools as JSON", "tools:MAX_TOOLS_BYTES", SIZE, _VALUE),
    _chat("size of the schema of a tool", "tools:MAX_SCHEMA_BYTES", SIZE, _VALUE),
    _chat("depth of the schema of a tool", "tool_schema:MAX_SCHEMA_DEPTH", COUNT, _VALUE),
    _chat(
        "length of a pattern in the schema of a tool",
        "tool_schema:MAX_PATTERN_CHARS",
        CHARS,
        _VALUE,
    ),
    _chat("length of the description of a tool", "tools:MAX_DESCRIPTION_CHARS", CHARS, _LONG),
    _http(
        "size of the schema of an answer", "calls.structured_fields:MAX_SCHEMA_BYTES", SIZE, _VALUE
    ),
    _http("length of `guided_grammar`", "calls.structured_fields:MAX_GRAMMAR_CHARS", CHARS, _LONG),
    _http("length of `guided_regex`", "calls.structured_fields:MAX_REGEX_CHARS", CHARS, _LONG),
    _http("choices in `guided_choice`", "calls.structured_fields:MAX_CHOICES", COUNT, _MANY),
    _http("length of a choice", "calls.structured_fields:MAX_CHOICE_CHARS", CHARS, _LONG),
)
TABLE: dict[str, tuple[Limit, ...]] = {
    "Head of a request": HEAD,
    "Body of a request": BODY,
    "Connections, queue and time": CONNECTIONS,
    "Sampling": SAMPLING,
    "Prompts and messages": PROMPTS,
    "Tools and structured output": SHAPES,
}


def default_of(limit: Limit) -> float | None:
    """Returns the default of the limit's setting, if it has one."""
    return getattr(HttpSettings(), limit.setting) if limit.setting else None


def markdown() -> str:
    """Returns the tables of docs/operations.md."""
    lines: list[str] = []
    for title, limits in TABLE.items():
        lines += [
            f"\n### {title}\n",
            "| limit | value | beyond the limit | setting |",
            "|---|---|---|---|",
        ]
        for limit in limits:
            setting = f"`{limit.setting}`" if limit.setting else ""
            lines.append(f"| {limit.what} | {_formatted(limit)} | {limit.beyond} | {setting} |")
    return "\n".join(lines) + "\n\n"


def _formatted(limit: Limit) -> str:
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
