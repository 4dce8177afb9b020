"""Tool calls and reasoning are parsed from text in every format, malformed or in any pieces."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.text.chat_parser import (
    AnswerParser,
    ChatFormat,
    Parser,
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
    make_parser,
)
from serve.text.chat_parser.calls import ToolCallParser
from serve.text.chat_parser.formats import REASONING_FORMATS, TOOL_FORMATS
from serve.text.chat_parser.reasoning import ReasoningParser
from serve.text.chat_parser.syntax.json_calls import MAX_EXTRA_CHARS
from serve.text.chat_parser.syntax.reader import MAX_HELD_CHARS
from tests.support.profile import examples
from tests.support.text.spoken_formats import spoken

TOOLS: dict[str, Any] = {"f": {}, "weather": {}}
CALL = '{"name": "f", "arguments": {"a": 1}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"


def make(tools: str | None, *, reasoning: bool = False, is_open: bool = False) -> AnswerParser:
    thinking = REASONING_FORMATS["deepseek_r1"]
    return AnswerParser(
        ReasoningParser(thinking, is_open=is_open) if reasoning else None,
        None if tools is None else ToolCallParser(TOOL_FORMATS[tools], TOOLS),
    )


def parse(parser: Parser, pieces: list[str]) -> list[tuple[str, ...]]:
    """Returns the parts with adjacent texts joined and without call ids."""
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish()
    joined: list[tuple[str, ...]] = []
    for part in parts:
        match part:
            case Text(text):
                item = ("text", text)
            case Reasoning(text):
                item = ("reasoning", text)
            case ToolCallStart(number, _, name):
                item = ("call", str(number), name)
            case ToolCallArguments(number, text):
                item = ("arguments", str(number), text)
        assert item[-1], "a part is empty"
        if joined and joined[-1][:-1] == item[:-1] and item[0] != "call":
            joined[-1] = (*item[:-1], joined[-1][-1] + item[-1])
        else:
            joined.append(item)
    return joined


def call(number: int = 0, arguments: str = '{"a": 1}', name: str = "f") -> list[tuple[str, ...]]:
    return [("call", str(number), name), ("arguments", str(number), arguments)]


TEXT_IN_STRING = '{"a": "</tool_call> \\" } ] <tool_call> ü👍"}'
CASES: list[tuple[str, str, list[tuple[str, ...]]]] = [
    ("hermes", "hello  world \n", [("text", "hello  world \n")]),
    ("hermes", HERMES, call()),
    ("hermes", f"I look.\n\n{HERMES}\n", [("text", "I look."), *call()]),
    ("hermes", f"{HERMES}\n{HERMES}", [*call(0), *call(1)]),
    ("hermes", f"{HERMES} and so", [*call(), ("text", "and so")]),
    ("hermes", f"<tool_call>{CALL}", call()),
    ("hermes", f"<tool_call>{CALL}</tool_", call()),
    ("hermes", f"<tool_call>{CALL[:-1]}\n</tool_call>", call()),
    ("hermes", f"<tool_call>{CALL[:-2]}\n</tool_call>", call(arguments='{"a": 1\n')),
    ("hermes", f"<tool_call>{CALL}}}</tool_call>", call()),
    ("hermes", f'<tool_call>{CALL[:-1]}, "id": "}}"}}</tool_call>', call()),
    (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {TEXT_IN_STRING}}}</tool_call>',
        call(arguments=TEXT_IN_STRING),
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', call(arguments="{}")),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', call()),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call()),
    ("hermes", '<tool_call>{"name": "new", "arguments": {}}', call(name="new", arguments="{}")),
    ("hermes", "<tool_call>{oops}</tool_call>!", [("text", "<tool_call>{oops}</tool_call>!")]),
    ("hermes", "a <tool_call> b", [("text", "a <tool_call> b")]),
    ("hermes", "a <tool_call>", [("text", "a <tool_call>")]),
    ("hermes", 'x<tool_call>{"name": "f"', [("text", 'x<tool_call>{"name": "f"')]),
    ("hermes", '<tool_call>{"name": 3}', [("text", '<tool_call>{"name": 3}')]),
    ("hermes", '<tool_call>{"name": "a b"}', [("text", '<tool_call>{"name": "a b"}')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}',
        [("text", '<tool_call>{"name": "f", "arguments": [1]}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', call(arguments='{"a": 1')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {a}}', call(arguments="{a}")),
    ("hermes", "1 < 2 <tool", [("text", "1 < 2 <tool")]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', call()),
    ("llama3_json", f" \n{CALL}; {CALL}", [*call(0), *call(1)]),
    ("llama3_json", f"<|python_tag|>{CALL}", call()),
    ("llama3_json", f"<|python_tag|>{CALL}\n", call()),
    ("llama3_json", "<|python_tag|>print(1)", [("text", "<|python_tag|>print(1)")]),
    ("llama3_json", f"no {CALL}", [("text", f"no {CALL}")]),
    (
        "llama3_json",
        '{"name": "Bob", "arguments": {}}!',
        [("text", '{"name": "Bob", "arguments": {}}!')],
    ),
    ("llama3_json", '{"answer": [1, {"b": 2}]}', [("text", '{"answer": [1, {"b": 2}]}')]),
    ("llama4_json", f"<|python_start|><|python_end|>{CALL}{CALL}", [*call(0), *call(1)]),
    ("llama4_json", f"<|python_start|>{CALL}<|python_end|>", call()),
    (
        "llama4_json",
        f"<|python_start|>I look.<|python_end|>{CALL}; {CALL}\n",
        [("text", "I look."), *call(0), *call(1)],
    ),
    ("llama4_json", f"{CALL} {CALL} and", [*call(0), *call(1), ("text", "and")]),
    ("llama4_json", "<|python_start|>x = 1<|python_end|> so", [("text", "x = 1 so")]),
    ("llama4_json", f'{CALL}{{"a": 2}}!', [*call(), ("text", '{"a": 2}!')]),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", [*call(0), *call(1)]),
    ("mistral", f"So: [TOOL_CALLS][{CALL}] then", [("text", "So:"), *call(), ("text", " then")]),
    ("mistral", "[TOOL_CALLS] none", [("text", "[TOOL_CALLS] none")]),
    ("mistral", f"[TOOL_CALLS][{CALL}, 3]", [*call(), ("text", ", 3]")]),
]


@pytest.mark.parametrize(("style", "text", "parts"), CASES)
def test_calls(style: str, text: str, parts: list[tuple[str, ...]]) -> None:
    assert parse(make(style), [text]) == parts
    assert parse(make(style), list(text)) == parts


@pytest.mark.parametrize(
    ("text", "is_open", "parts"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nYes", False, [("reasoning", "hm\n\nso"), ("text", "Yes")]),
        ("\nhm</think>Yes\n", True, [("reasoning", "hm"), ("text", "Yes\n")]),
        (" \n<think></think>Yes", False, [("text", "Yes")]),
        ("<think>hm\n", False, [("reasoning", "hm\n")]),
        ("<thin", False, [("text", "<thin")]),
        ("I <think> so </think>", False, [("text", "I <think> so </think>")]),
        ("hm </thi", True, [("reasoning", "hm </thi")]),
        ("", True, []),
    ],
)
def test_reasoning(text: str, is_open: bool, parts: list[tuple[str, ...]]) -> None:
    for pieces in ([text], list(text)):
        assert parse(make(None, reasoning=True, is_open=is_open), pieces) == parts


def test_calls_count_only_after_the_reasoning() -> None:
    text = f"<think>{HERMES}</think>\n{HERMES}"
    expected = [("reasoning", HERMES), *call()]
    assert parse(make("hermes", reasoning=True), list(text)) == expected


def ended_by_calls(name: str) -> Parser:
    row = TOOL_FORMATS[name]
    style = ChatFormat(row, REASONING_FORMATS["deepseek_r1"], call_begins=(row.begin,))
    parser = make_parser(style, TOOLS, reasons=True, is_open=True)
    return parser


@pytest.mark.parametrize("name", ["kimi_k2", "qwen3_coder", "glm45", "hermes", "mistral_args"])
def test_a_call_ends_the_reasoning(name: str) -> None:
    """If its marker is a token, and a call follows; a marker that the model mentions does not."""
    begin, calls = TOOL_FORMATS[name].begin, spoken(name, [("f", {"a": 1})])
    for text in (f"I look.\n{calls}", f"I look.\n</think>\n\n{calls}"):
        expected = [("reasoning", "I look."), *call()]
        for pieces in ([text], list(text)):
            assert parse(ended_by_calls(name), pieces) == expected
    for text in (f"A {begin} is not\n{begin}", f"{begin} no\n\n {begin}"):
        for pieces in ([text], list(text)):
            assert parse(ended_by_calls(name), pieces) == [("reasoning", text)]
            more = [*pieces, *"\n</think>so"]
            assert parse(ended_by_calls(name), more) == [("reasoning", text), ("text", "so")]


def test_a_call_that_is_cut_or_long_in_the_reasoning() -> None:
    cut = '<tool_call>{"name": "f", "arguments": {'
    long = '<tool_call>{"arguments": {"a": "' + "x" * 400 + '"}, "name": "f"}'
    for pieces in ([cut], list(cut)):
        assert parse(ended_by_calls("hermes"), pieces) == call(arguments="{")
    for pieces in ([cut[:20]], list(cut[:20])):
        assert parse(ended_by_calls("hermes"), pieces) == [("reasoning", cut[:20])]
    for pieces in ([long], list(long)):
        assert parse(ended_by_calls("hermes"), pieces)[0] == ("call", "0", "f")


@pytest.mark.covering(1)
@pytest.mark.parametrize("blank", ["\n", " \n"])
@pytest.mark.parametrize("name", ["deepseek_r1", "ernie45"])
def test_much_white_space_takes_linear_time(name: str, blank: str) -> None:
    style = REASONING_FORMATS[name]
    spaces = blank * 100_000
    for before, is_open in (("", False), ("", True), ("a", True), ("a</think>", True),
                            ("a</think><response>b", True)):  # fmt: skip
        parser = ReasoningParser(style, is_open=is_open)
        for piece in (*before, *spaces):
            parser.push(piece)
        parser.finish()


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>",
    CALL, HERMES, '{"name": "f", "arguments": {', '"name"', '"f"', "{", "}", "[", "]", ",", ";",
    '"', "\\", ":", "<", " ", "\n", "x", "é", '{"a": "b"}', '{"name": "weather", "parameters": {}}',
]  # fmt: skip


@examples(400, derandomize=True, database=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    style=st.sampled_from([*TOOL_FORMATS, None]),
    reasoning=st.booleans(),
    is_open=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_the_parts_do_not_depend_on_the_pieces(
    fragments: list[str], style: str | None, reasoning: bool, is_open: bool, seed: int
) -> None:
    text = "".join(fragments)
    rng = random.Random(seed)
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    whole = parse(make(style, reasoning=reasoning, is_open=is_open), [text])
    for parts in (pieces, list(text)):
        assert parse(make(style, reasoning=reasoning, is_open=is_open), parts) == whole
    if style is not None:
        whole_of_calls = parse(ended_by_calls(style), [text])
        for parts in (pieces, list(text)):
            assert parse(ended_by_calls(style), parts) == whole_of_calls
    if style is None and not reasoning:
        assert whole == ([("text", text)] if text else [])
    if not any(kind == "call" for kind, *_ in whole) and not reasoning:
        assert "".join(item[-1] for item in whole) == text, "text without a call is complete"


def test_a_call_streams() -> None:
    """The name comes before the arguments are complete, and these come piece by piece."""
    parser = make("hermes")
    assert parser.push('<tool_call>\n{"name": "f", "argum') == []
    assert [type(part) for part in parser.push('ents": {"a')] == [ToolCallStart, ToolCallArguments]
    assert parser.push('": [1') == [ToolCallArguments(0, '": [1')]


def test_held_text_is_bounded() -> None:
    start = '<tool_call>{"arguments": "'
    for size, is_call in ((1000, True), (MAX_HELD_CHARS, False)):
        text = f'{start}{{}}{" " * size}", "name": "f"}}'
        pieces = [text[i : i + 1000] for i in range(0, len(text), 1000)]
        whole = parse(make("hermes"), [text])
        assert parse(make("hermes"), pieces) == whole
        assert (whole[0][0] == "call") is is_call
        assert is_call or whole == [("text", text)]


def test_text_after_arguments_is_bounded() -> None:
    extra = ', "x": "' + "y" * MAX_EXTRA_CHARS
    whole = parse(make("hermes"), [f"<tool_call>{CALL[:-1]}{extra}"])
    assert whole == [*call(), ("text", extra)]
    assert parse(make("hermes"), list(f"<tool_call>{CALL[:-1]}{extra}")) == whole


@pytest.mark.parametrize("size", [2000, pytest.param(10_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("start", "repeated"),
    [("", "<tool_call>{"), ("", "{{{{{"), ("<tool_call>", "[[[[["), ("", " \n")],
)
def test_malformed_text_takes_linear_time(start: str, repeated: str, size: int) -> None:
    text = start + repeated * size
    for style in TOOL_FORMATS:
        pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
        assert "".join(item[-1] for item in parse(make(style), pieces)) == text


def test_lone_surrogates_in_arguments_are_escaped() -> None:
    """The arguments of a call that is parsed as a whole can be encoded in UTF-8."""
    text = '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>'
    parts = parse(make("hermes"), [text])
    parts[1][-1].encode()
    assert json.loads(parts[1][-1]) == {"a": "\ud800"}


@pytest.mark.parametrize(
    "arguments", ['{"a": 1e999}', '{"a": NaN}', "[" * 9999, '"' + "9" * 5000 + '"', "3"]
)
def test_a_call_whose_arguments_are_not_an_object_is_text(arguments: str) -> None:
    text = f'<tool_call>{{"arguments": {arguments}, "name": "f"}}'
    assert parse(make("hermes"), [text]) == [("text", text)]


def test_ids_of_calls() -> None:
    assert TOOL_FORMATS["hermes"].make_id("f", 0).startswith("call_")
    short = {TOOL_FORMATS["mistral"].make_id("f", 0) for _ in range(50)}
    assert len(short) == 50
    assert all(len(item) == 9 and item.isalnum() for item in short)


def test_kimis_ids_count_the_calls_of_the_conversation() -> None:
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    one = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    text = f"{begin}{one.format('functions.f:0')}{one.format('functions.weather:1')}{end}"
    parser = ToolCallParser(TOOL_FORMATS["kimi_k2"], TOOLS, 3)
    parts = parser.push(text) + parser.finish()
    ids = [part.call_id for part in parts if isinstance(part, ToolCallStart)]
    assert ids == ["functions.f:3", "functions.weather:4"]


def test_stored_calls_get_ids_that_templates_take() -> None:
    calls: list[Any] = [
        {"id": item, "function": {"name": "f", "arguments": {}}} for item in ("call_1", "call_2")
    ]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_2", "content": "2"},
        {"role": "tool", "tool_call_id": "unknown", "content": ""},
    ]
    for name, pattern in (("mistral", "[A-Za-z0-9]{9}"), ("kimi_k2", r"functions\.f:[01]")):
        fit = TOOL_FORMATS[name].fit_ids
        assert fit is not None
        first, second, other = fit(messages)
        ids = [call["id"] for call in first["tool_calls"]]
        assert all(re.fullmatch(pattern, item) for item in ids) and len(set(ids)) == 2
        assert second["tool_call_id"] == ids[1]
        assert other["tool_call_id"] == "unknown"
        assert fit(fit(messages)) == fit(messages), "its own ids stay"
    assert calls[0]["id"] == "call_1", "the messages of the client stay as they are"
