"""Conversations with tools are encoded in the template's format or in ours, and text of a client
never becomes a special token."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.config import EngineConfig, default_model_path
from serve.engine.chat_prompt import encode_chat, make_chat_format
from serve.engine.request_limits import RequestLimits
from serve.errors import RequestError
from serve.text.chat_parser import ChatFormat, choose_format
from serve.text.chat_template import ChatTemplate
from serve.text.tokenizer import Tokenizer
from tests.support.engine.checkpoints import checkpoint

LIMITS = RequestLimits(max_model_len=8192, vocab_size=4096, max_num_waiting=1, max_num_seqs=1)
NATIVE = (
    "{{ bos_token }}"
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{{ mood }}{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "description": "does", "parameters": {}}}
USER = {"role": "user", "content": "hi"}
RESULTS: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": "ü"}}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "1"},
    {"role": "tool", "tool_call_id": "b", "content": "2"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint("llama"))


_TEMPLATES: dict[str, ChatTemplate] = {}  # each template runs in a process of its own


@pytest.fixture(scope="module", autouse=True)
def _ended_templates() -> Iterator[None]:
    yield
    for template in _TEMPLATES.values():
        template.close()


def make_template(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    if source not in _TEMPLATES:
        _TEMPLATES[source] = ChatTemplate(source, special_tokens=tokenizer.named_tokens)
    return _TEMPLATES[source]


def render(
    source: str, messages: list[dict[str, Any]], tokenizer: Tokenizer, **options: Any
) -> str:
    chat_format = choose_format(source, "auto", "auto")
    template = make_template(source, tokenizer)
    ids = encode_chat(template, tokenizer, messages, LIMITS, style=chat_format, **options)
    return tokenizer.decode(ids, skip_special_tokens=False)


def conversation(text: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns messages and options with the text in every field that a client can write."""
    function = {"name": text, "arguments": {text: [{text: text}], "x": text}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": text}], "name": text},
        {
            "role": "assistant",
            "content": text,
            "reasoning_content": text,
            "tool_calls": [{"id": text, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": text, "content": text},
    ]
    parameters = {"type": "object", "properties": {text: {"enum": [text], "description": text}}}
    described = {"name": text, "description": text, "parameters": parameters}
    options = {
        "tools": [{"type": "function", "function": described}],
        "template_kwargs": {"mood": text},
    }
    return messages, options


@pytest.mark.row("T6")
@pytest.mark.parametrize("source", [NATIVE, NATIVE.replace("tools", "other")])
@pytest.mark.parametrize("seed", range(3))
def test_no_special_id_comes_from_a_client(source: str, seed: int, tokenizer: Tokenizer) -> None:
    specials = tokenizer.special_token_strings
    rng = random.Random(seed)
    fragments = [
        *specials,
        *(special[:2] for special in specials),
        *(special[2:] for special in specials),
        " ",
    ]
    hostile = "".join(rng.choices(fragments, k=30))
    chat_format = choose_format(source, "auto", "auto")
    counts = []
    template = make_template(source, tokenizer)
    for text in ("harmless", hostile):
        messages, options = conversation(text)
        ids = encode_chat(template, tokenizer, messages, LIMITS, style=chat_format, **options)
        counts.append([token for token in ids if token in tokenizer.special_ids])
    assert counts[0]
    assert counts[0] == counts[1]


@pytest.mark.row("T7")
@pytest.mark.parametrize("text", ["{{7*7}}", "{% for x in y %}", "{{ ''.__class__ }}"])
def test_template_code_from_a_client_is_text(text: str, tokenizer: Tokenizer) -> None:
    for source in (NATIVE, NATIVE.replace("tools", "other")):
        messages, options = conversation(text)
        assert render(source, messages, tokenizer, **options).count(text) >= 8


def test_tools_in_the_format_of_the_template(tokenizer: Tokenizer) -> None:
    text = render(NATIVE, RESULTS, tokenizer, tools=[TOOL], template_kwargs={"mood": "calm"})
    assert '{"type": "function", "function": {"name": "f", "description": "does"' in text
    assert '<tool_call>f{"x": "ü"}<tool_call>g{}' in text
    assert "calm[user]hi" in text


def test_tools_for_a_template_without_tools() -> None:
    tokenizer = Tokenizer.load(default_model_path())
    source = tokenizer.chat_template
    assert source is not None
    chat_format = make_chat_format(tokenizer, EngineConfig())
    assert chat_format.tools is not None
    assert (chat_format.tools.name, chat_format.has_native_tools) == ("hermes", False)
    text = render(source, RESULTS, tokenizer, tools=[TOOL])
    assert text.startswith("<|bos|><|system|>You may use these functions")
    assert '\n{"name": "f", "description": "does", "parameters": {}}\n' in text
    dialog = (
        "<|user|>hi<|end|><|assistant|>I look.\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": "ü"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|end|>'
        "<|user|><tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|end|><|assistant|>"
    )
    assert text.endswith(dialog)
    assert render(source, RESULTS, tokenizer) == f"<|bos|>{dialog}"
    system = [{"role": "system", "content": "Be kind."}, USER]
    text = render(source, system, tokenizer, tools=[TOOL])
    assert text.startswith("<|bos|><|system|>Be kind.\n\nYou may use these functions")


CUT = '{"x": "a \\"b'
CUT_CALL: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": CUT}}
        ],
    },
    USER,
]


def test_a_call_that_was_cut_off_is_rendered_as_text(tokenizer: Tokenizer) -> None:
    source = tokenizer.chat_template
    assert source is not None
    text = render(source, CUT_CALL, tokenizer, tools=[TOOL])
    assert f'<tool_call>\n{{"name": "f", "arguments": {CUT}\n</tool_call>' in text
    text = render(NATIVE, CUT_CALL, tokenizer, tools=[TOOL])
    assert f"<tool_call>f{json.dumps(CUT)}" in text


def test_a_template_that_writes_each_argument_gets_one(tokenizer: Tokenizer) -> None:
    each = (
        "{% for name, value in call.function.arguments | items %}<{{ name }}={{ value }}>"
        "{% endfor %}"
    )
    source = NATIVE.replace("{{ call.function.arguments | tojson }}", each)
    assert source != NATIVE
    text = render(source, CUT_CALL, tokenizer, tools=[TOOL])
    assert f"<tool_call>f<arguments={CUT}>" in text
    whole = render(source, RESULTS, tokenizer, tools=[TOOL])
    assert "<tool_call>f<x=ü>" in whole


def test_a_template_without_a_system_role(tokenizer: Tokenizer) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}[{{ m.role }}]{{ m.content }}"
        "{% endfor %}"
    )
    text = render(source, [USER], tokenizer, tools=[TOOL])
    assert text.startswith("[user]You may use")
    assert text.endswith("\n\nhi")


@pytest.mark.parametrize("trim", ["", " | trim"])
def test_the_last_message_is_continued(trim: str, tokenizer: Tokenizer) -> None:
    source = NATIVE.replace("m.content", f"m.content{trim}")
    messages = [USER, {"role": "assistant", "content": "It is "}]
    text = render(
        source, messages, tokenizer, add_generation_prompt=False, continue_final_message=True
    )
    assert text.endswith("[assistant]It is ")


def test_a_template_that_hides_the_last_message(tokenizer: Tokenizer) -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    source = "{{ messages[0].content }}"
    with pytest.raises(RequestError) as caught:
        render(source, messages, tokenizer, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.row("T10")
def test_an_exception_of_a_template_is_a_request_error(tokenizer: Tokenizer) -> None:
    source = "{{ tools }}<tool_call>{{ raise_exception('roles must take turns') }}"
    with pytest.raises(RequestError) as caught:
        render(source, RESULTS, tokenizer, tools=[TOOL])
    assert caught.value.param == "messages"
    assert "roles must take turns" in str(caught.value)


def test_markers_that_are_special_tokens_have_ids(tmp_path: Path) -> None:
    shutil.copytree(default_model_path(), tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    for number, text in enumerate(("<tool_call>", "</think>")):
        token = {**content["added_tokens"][0], "id": 4096 + number, "content": text}
        content["added_tokens"].append(token)
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path / "model")
    chat_format = make_chat_format(tokenizer, EngineConfig(reasoning_parser="deepseek_r1"))
    assert chat_format.special_ids == {"<tool_call>": 4096, "</think>": 4097}
    assert chat_format.reasoning_end_id == 4097


def test_markers_of_several_tokens_have_ids(tmp_path: Path) -> None:
    """Of a marker that is more than one token, those that are special have ids."""
    shutil.copytree(default_model_path(), tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    names = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>")
    known = {token["content"] for token in content["added_tokens"]}
    for number, text in enumerate(name for name in names if name not in known):
        token = {**content["added_tokens"][0], "id": 4096 + number, "content": text}
        content["added_tokens"].append(token)
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path / "model")
    chat_format = make_chat_format(tokenizer, EngineConfig(tool_parser="openai"))
    assert chat_format.tools is not None
    reasoned = make_chat_format(
        tokenizer, EngineConfig(reasoning_parser="openai_gptoss", tool_parser="none")
    )
    assert set(reasoned.special_ids) == set(names)
    assert reasoned.reasoning_end_id == tokenizer.special_token_ids["<|end|>"]


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("{{ call.function.arguments | tojson }}", '{"x": "ü"}'),
        ("{{ '+' + call.function.arguments }}", '+{"x": "ü"}'),  # as DeepSeek's and Apertus's do
    ],
)
def test_arguments_are_what_the_template_takes(
    arguments: str, written: str, tokenizer: Tokenizer
) -> None:
    source = NATIVE.replace("{{ call.function.arguments | tojson }}", arguments)
    assert source.count(arguments) == 1
    assert written in render(source, RESULTS, tokenizer, tools=[TOOL])


def test_reasoning_has_the_name_that_the_template_knows(tokenizer: Tokenizer) -> None:
    source = "{{ tools }}<tool_call>{% for m in messages %}{{ m.thinking }}{% endfor %}"
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    assert "hm" in render(source, [USER, thought], tokenizer)
    refusing = source.replace(
        "{{ m.thinking }}",
        "{% if m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}{{ m.content }}",
    )
    assert "said" in render(refusing, [USER, {**thought, "content": "said"}], tokenizer)


def test_the_default_format_changes_nothing(tokenizer: Tokenizer) -> None:
    template = make_template(NATIVE, tokenizer)
    plain = encode_chat(template, tokenizer, [USER], LIMITS)
    with_default_format = encode_chat(template, tokenizer, [USER], LIMITS, style=ChatFormat())
    assert plain == with_default_format
