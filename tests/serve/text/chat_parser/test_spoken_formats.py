"""The grammar of strict calls takes what a model of each format writes."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from serve.text.chat_parser import ChatFormat
from serve.text.chat_parser.formats import TOOL_FORMATS
from serve.text.chat_parser.grammar import calls_or_content
from tests.support.text.spoken_formats import said, spoken

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FUNCTION = {"name": "add", "parameters": PARAMETERS, "strict": True}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_grammar_takes_what_is_spoken(name: str) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    form = calls_or_content(ChatFormat(TOOL_FORMATS[name]), tools, None, parallel=True)
    for text in (spoken(name, [("add", {"a": 2, "b": 3})]), said(name, "5 and 2.")):
        written = text.removesuffix("<|call|>").encode()  # this ends an answer, as eos does
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(form.source))
        assert matcher.try_consume_tokens(list(written)) == len(written)
        assert matcher.is_accepting()
