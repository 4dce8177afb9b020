"""The chat template and the settings choose the formats of calls and of reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from serve.parser_names import REASONING_PARSERS, TOOL_PARSERS
from serve.text.chat_parser import choose_format
from serve.text.chat_parser.formats import REASONING_FORMATS, TOOL_FORMATS, setting_names
from tests.support.text.formats_table import PAGE, with_table


def test_the_settings_name_the_formats() -> None:
    tools, reasoning = setting_names()
    assert ("auto", *tools, "none") == TOOL_PARSERS
    assert ("auto", *reasoning, "none") == REASONING_PARSERS


def test_the_docs_have_every_format() -> None:
    """If this fails, `python tests/support/text/formats_table.py` rewrites the tables."""
    assert PAGE.read_text() == with_table(PAGE.read_text())


@pytest.mark.parametrize(
    ("template", "tools", "is_native", "reasoning"),
    [
        ("{{ messages }}", "hermes", False, None),
        ("{% if tools %}<tool_call>{% endif %}</think>", "hermes", True, "deepseek_r1"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral", True, None),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3_json", True, None),
        ("{% if tools %}<tool_call><function={% endif %}", "hermes", False, None),
        ("{% if tools %}<|channel|>{% endif %}", "hermes", False, None),
    ],
)
def test_the_template_chooses_the_format(
    template: str, tools: str, is_native: bool, reasoning: str | None
) -> None:
    style = choose_format(template, "auto", "auto")
    assert style.tools is TOOL_FORMATS[tools]
    assert style.has_native_tools is is_native
    assert (style.reasoning.name if style.reasoning else None) == reasoning


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_marks_of_a_format_choose_it(name: str) -> None:
    row = TOOL_FORMATS[name]
    for mark in row.marks:
        style = choose_format(f"{{{{ tools }}}} {mark} {' '.join(row.needs)}", "auto", "none")
        assert style.tools is row and style.has_native_tools


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_the_marks_of_reasoning_choose_it(name: str) -> None:
    row = REASONING_FORMATS[name]
    for mark in row.marks:
        style = choose_format(f"{mark} {' '.join(row.needs)}", "none", "auto")
        assert style.reasoning is row


def test_formats_with_parts_of_others_are_told_apart() -> None:
    for template, tools, reasoning in (
        # Granite 4, Qwen 3, Seed-OSS, Qwen3-Coder, MiniMax, GLM-4.5, Ministral 3
        ("<tool_call> </think>", "hermes", "deepseek_r1"),
        ("<seed:tool_call><function=f><parameter=x> <seed:think>", "seed_oss", "seed_oss"),
        ("<tool_call><function=f><parameter=x>", "qwen3_coder", None),
        ("<minimax:tool_call> <response></response> </think>", "minimax_m2", "deepseek_r1"),
        ("<tool_call>f<arg_key></arg_key> </think>", "glm45", "deepseek_r1"),
        ("[TOOL_CALLS]f[ARGS] [THINK][/THINK]", "mistral_args", "mistral"),
        ("<|tool_call|> </think> <response></response>", "granite", "ernie45"),
        ("<|tool_call|><|/tool_call|>", "phi4_mini", None),
        ("<|tool|> <|/tool|> functools[", "phi4_mini_json", None),
        ("<|tool_call> <|channel>thought <channel|>", "gemma4", "gemma4"),
    ):
        style = choose_format(f"{template} {{% if tools %}}", "auto", "auto")
        assert style.tools is TOOL_FORMATS[tools], template
        assert (style.reasoning and style.reasoning.name) == reasoning, template


def test_settings_choose_the_format() -> None:
    style: Any = choose_format("{{ tools }}<tool_call></think>", "mistral", "none")
    assert (style.tools.name, style.has_native_tools, style.reasoning) == ("mistral", True, None)
    assert choose_format("", "none", "deepseek_r1").tools is None
    described = choose_format("", "mistral", "auto")
    assert described.tools is TOOL_FORMATS["hermes"], "the format in which the tools are described"
    assert not described.has_native_tools
    new = choose_format("{{ tools }}[TOOL_CALLS]f[ARGS]", "mistral", "qwen3")
    assert new.tools is TOOL_FORMATS["mistral_args"], "the format that this template has"
    assert new.reasoning is REASONING_FORMATS["deepseek_r1"], "an alias"
    assert choose_format("{{ tools }}", "glm47", "none").tools is TOOL_FORMATS["glm45"]


@pytest.mark.parametrize(
    ("code", "is_read"),
    [
        ("{%- for tool in tools %}", True),
        ("{{ '}' }}{%- if tools is not none %}", True),
        ("{{ tools | tojson }}", True),
        ("{% if 'tools' in message %}{{ message['tools'] }}{{ message.tools }}", False),
        ("Use tools. {# tools #}{{ 'tools: %}' }}{% set tools = 1 %}", False),
    ],
)
def test_only_the_variable_tools_shows_tools(code: str, is_read: bool) -> None:
    assert choose_format(f"<tool_call>{code}", "auto", "none").has_native_tools is is_read


def test_templates_that_write_calls_and_show_no_tools() -> None:
    """The format stays: the conversation describes the tools in it."""
    calls = "{% for call in message.tool_calls %}<｜tool▁calls▁begin｜>{{ call }}{% endfor %}"
    for template, setting, name in (
        (calls, "auto", "deepseek_v31"),
        (f"{calls}```json", "auto", "deepseek_v3"),
        (calls, "deepseek_v3", "deepseek_v3"),
    ):
        style = choose_format(template, setting, "none")
        assert style.tools is TOOL_FORMATS[name]
        assert (style.has_native_tools, style.has_native_calls) == (False, True)


def test_a_setting_that_cannot_be_kept_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_format("{{ messages }}", "kimi_k2", "none").tools is TOOL_FORMATS["hermes"]
    assert "tool_parser kimi_k2 is not used" in caplog.text
    caplog.clear()
    choose_format("{{ messages }}", "granite4", "none")
    assert not caplog.text
