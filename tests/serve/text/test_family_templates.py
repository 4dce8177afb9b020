"""Chat templates of this year's families render as in Transformers; which template is used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.config import default_model_path
from serve.engine.chat_prompt import encode_chat, make_chat_template
from serve.engine.request_limits import RequestLimits
from serve.errors import ModelLoadError, RequestError
from serve.text.chat_parser import choose_format
from serve.text.chat_parser.formats import REASONING_FORMATS, TOOL_FORMATS
from serve.text.chat_parser.syntax.stored_calls import with_thinking
from serve.text.chat_template import ChatTemplate
from serve.text.reasoning_prompt import is_reasoning_open
from serve.text.tokenizer import Tokenizer
from serve.text.tokenizer_config import read_text_config
from tests.support.engine.checkpoints import checkpoint, edit_json

FOLDER = Path(__file__).parents[2] / "support" / "engine" / "templates"
# with the constructs of published templates, and shorter
TEMPLATES = {file.stem: file.read_text("utf-8") for file in sorted(FOLDER.glob("*.jinja"))}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Köln", "<b>"]},
        "days": {"type": "array", "items": {"type": "integer"}},
        "where": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}},
    },
    "required": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "d", "parameters": PARAMETERS},
    }
]
CALL = {
    "id": "functions.weather:0",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2], "x": True}},
}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm\n"}
RESULT = {"role": "tool", "tool_call_id": CALL["id"], "content": '{"t": 3}'}
USER = {"role": "user", "content": "hi {{7*7}} <b>"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "system": [
        {"role": "system", "content": "be brief /no_think"},
        USER,
        {"role": "assistant", "content": "<think>a</think>\n\nso"},
        {"role": "user", "content": " and? "},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " part "}]}],
    "calls": [USER, CALLED, RESULT, RESULT],
    "answered": [USER, CALLED, RESULT, {"role": "assistant", "content": "warm"}, USER],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "thinking": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    "not thinking": {"enable_thinking": False, "thinking": False, "thinking_budget": 600},
    "documents": {"documents": [{"title": "a", "text": "b"}, {"title": "é", "text": ""}]},
}


@pytest.fixture(scope="module")
def templates() -> Iterator[dict[str, ChatTemplate]]:
    made = {name: ChatTemplate(text, special_tokens=SPECIAL) for name, text in TEMPLATES.items()}
    yield made
    for template in made.values():
        template.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(default_model_path())


def test_all_templates_are_found() -> None:
    assert len(TEMPLATES) == 16


# For each template: the format of calls and of reasoning; how it has tools and stored calls; and
# whether a prompt ends inside the reasoning by default, and with the switch off.
NATIVE, CALLS, KEY, NONE = (True, True, False), (False, True, False), (False, False, True), (
    False, False, False)  # fmt: skip
DETECTED: dict[str, tuple[Any, ...]] = {
    "cohere2": ("cohere_command3", "cohere_command3", NATIVE, True, True),
    "deepseek": ("deepseek_v31", "deepseek_r1", CALLS, False, False),
    "deepseek_r1": ("deepseek_v3", "deepseek_r1", CALLS, True, True),
    "exaone4": ("hermes", "deepseek_r1", NATIVE, False, False),
    "gemma3": ("hermes", None, NONE, False, False),
    "gemma4": ("gemma4", None, NATIVE, False, False),
    "glm": ("glm45", "deepseek_r1", NATIVE, False, False),
    "gpt_oss": ("openai", "openai_gptoss", NATIVE, False, False),
    "granite": ("granite", None, NATIVE, False, False),
    "kimi": ("kimi_k2", "deepseek_r1", NATIVE, False, False),
    "llama4": ("llama4_json", None, NATIVE, False, False),
    "minimax": ("minimax_m2", None, NATIVE, False, False),
    "phi_4": ("phi4_mini", None, KEY, False, False),
    "qwen3": ("hermes", "deepseek_r1", NATIVE, False, False),
    "seed_oss": ("seed_oss", "seed_oss", NATIVE, False, True),
    "smollm3": ("hermes", "deepseek_r1", NATIVE, False, False),
}
OFF = {"enable_thinking": False, "thinking": False, "thinking_budget": 0}


@pytest.mark.parametrize("name", DETECTED)
def test_what_a_template_has(
    name: str, templates: dict[str, ChatTemplate], tokenizer: Tokenizer
) -> None:
    tools, reasoning, has, *is_open = DETECTED[name]
    style = choose_format(TEMPLATES[name], "auto", "auto")
    assert style.tools is TOOL_FORMATS[tools]
    assert style.reasoning is (reasoning and REASONING_FORMATS[reasoning])
    assert (style.has_native_tools, style.has_native_calls, style.has_tools_key) == has
    if style.reasoning is None:
        return
    for options, expected in zip(({}, OFF), is_open, strict=True):
        ids = tokenizer.encode(templates[name].render([USER], extra=options))
        assert is_reasoning_open(tokenizer, style.reasoning, ids) is expected


def shown(name: str, templates: dict[str, ChatTemplate], tokenizer: Tokenizer) -> str:
    """Returns the prompt of a conversation with tools, a call and its result."""
    style = choose_format(TEMPLATES[name], "auto", "auto")
    limits = RequestLimits(max_model_len=9999, vocab_size=4096, max_num_waiting=1, max_num_seqs=1)
    messages = [*CONVERSATIONS["calls"], {"role": "user", "content": "and?"}]
    ids = encode_chat(templates[name], tokenizer, messages, limits, style=style, tools=TOOLS)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", sorted({*DETECTED} - {"gemma3"}))  # that wants other roles
def test_every_template_shows_tools(
    name: str, templates: dict[str, ChatTemplate], tokenizer: Tokenizer
) -> None:
    text = shown(name, templates, tokenizer)
    assert "weather" in text and "days" in text


def test_descriptions_in_the_format_of_the_template(
    templates: dict[str, ChatTemplate], tokenizer: Tokenizer
) -> None:
    """DeepSeek's own templates write calls and show no tools."""
    begin, sep = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    text = shown("deepseek", templates, tokenizer)
    assert f'write:\n{begin}f{sep}{{"x": 1}}' in text
    assert f'{begin}weather{sep}{{"city": "Köln"' in text
    assert '<｜tool▁output▁begin｜>{"t": 3}<｜tool▁output▁end｜>' in text
    text = shown("deepseek_r1", templates, tokenizer)
    assert f'write:\n{begin}function{sep}f\n```json\n{{"x": 1}}\n```' in text
    assert f"{begin}function{sep}weather\n```json\n" in text


def test_tools_in_the_system_message(
    templates: dict[str, ChatTemplate], tokenizer: Tokenizer
) -> None:
    """Phi-4-mini's template has the text of the tools there, and no calls."""
    text = shown("phi_4", templates, tokenizer)
    assert '<|system|>You are a helpful assistant with some tools.<|tool|>[{"name": "weath' in text
    assert "}]<|/tool|><|end|><|user|>hi" in text
    assert '<|assistant|><|tool_call|>[{"name": "weather", "arguments": {"city": "Köln"' in text
    assert 'true}}]<|/tool_call|><|end|><|tool|>{"t": 3}<|end|>' in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(templates: dict[str, ChatTemplate], name: str) -> None:
    """Also where both refuse a conversation, as those that want roles to alternate."""
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = 0
    for messages in CONVERSATIONS.values():
        for options in OPTIONS.values():
            for tools, adds in ((None, True), (TOOLS, True), (TOOLS, False)):
                try:
                    (expected,), _ = render_jinja_template(
                        conversations=[messages],
                        tools=tools,
                        chat_template=TEMPLATES[name],
                        add_generation_prompt=adds,
                        **SPECIAL,
                        **options,
                    )
                except (TemplateError, TypeError):
                    with pytest.raises(RequestError):
                        templates[name].render(messages, tools=tools, extra=options)
                    continue
                # Transformers gives reasoning its other name in every template
                named = with_thinking(messages, TEMPLATES[name])
                got = templates[name].render(
                    named, tools=tools, add_generation_prompt=adds, extra=options
                )
                assert got == expected
                rendered += 1
    assert rendered >= 24
    assert templates[name].find_problem() is None


def test_assignments_end_with_a_generation_block() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    text = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    (expected,), _ = render_jinja_template(conversations=[[USER]], chat_template=text)
    template = ChatTemplate(text, special_tokens=SPECIAL)
    try:
        assert template.render([USER]) == expected == "21"
    finally:
        template.close()


# -- which template is used


def named(default: str, tool_use: str) -> list[dict[str, str]]:
    return [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]


def test_conversations_with_tools_have_a_template(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    templates = named("plain", "tools: {{ tools | length }}")
    edit_json(path / "tokenizer_config.json", lambda values: values.update(chat_template=templates))
    template = make_chat_template(read_text_config(path))
    assert template is not None
    try:
        assert template.render([USER]) == template.render([USER], tools=[]) == "plain"
        assert template.render([USER], tools=TOOLS) == "tools: 1"
    finally:
        template.close()


def test_where_templates_are_looked_for(tmp_path: Path) -> None:
    """As in Transformers: a file, tokenizer_config.json, and then chat_template.json."""
    config = tmp_path / "tokenizer_config.json"
    assert read_text_config(tmp_path).chat_template is None
    legacy = tmp_path / "chat_template.json"
    legacy.write_text(json.dumps({"chat_template": "legacy"}))
    assert read_text_config(tmp_path).chat_template == "legacy"
    assert read_text_config(tmp_path).template_file == legacy
    config.write_text(json.dumps({"chat_template": named("config", "config tools")}))
    found = read_text_config(tmp_path)
    assert (found.chat_template, found.tool_template) == ("config", "config tools")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("file tools")
    assert read_text_config(tmp_path).tool_template == "config tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    found = read_text_config(tmp_path)
    assert (found.chat_template, found.tool_template) == ("file", "file tools")
    (folder / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"tool_use\.jinja"):
        read_text_config(tmp_path)
    (folder / "tool_use.jinja").unlink()
    config.write_text(json.dumps({"chat_template": [{"name": "rag", "template": "x"}, 7, {}]}))
    (tmp_path / "chat_template.jinja").unlink()
    assert read_text_config(tmp_path).chat_template is None
