"""The built-in chat templates equal a plain writing of Mistral's formats, version by version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.engine.text_loader import TextLoading
from serve.errors import RequestError
from serve.text.chat_template import ChatTemplate
from serve.text.mistral_template import find_version, mistral_template
from serve.text.tokenizer_config import read_text_config
from tests.support.engine.rank_files import learned_ranks, tekken_file

VERSIONS = (3, 7, 11, 13, 15)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "wéather", "description": "d", "parameters": PARAMETERS},
    }
]


def call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    return {
        "type": "function",
        "id": call_id,
        "function": {"name": name, "arguments": arguments},
    }


TURNS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "hi"}],
    "system": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": " two  "},
        {"role": "user", "content": "three"},
    ],
    "calls": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U1"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                call("F1", {"city": "Köln", "n": [1, None]}, "aaaaaaaa1"),
                call("F2", {}, "aaaaaaaa2"),
            ],
        },
        {"role": "tool", "tool_call_id": "aaaaaaaa1", "content": '{"t": 3}'},
        {"role": "tool", "tool_call_id": "aaaaaaaa2", "content": "warm"},
        {"role": "assistant", "content": "A2"},
        {"role": "user", "content": [{"type": "text", "text": "U2"}]},
    ],
    "thinking": [
        {"role": "user", "content": "U1"},
        {"role": "assistant", "content": "A1", "reasoning_content": "hm"},
        {"role": "user", "content": "U2"},
    ],
}


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or [])


def written(version: int, messages: list[dict[str, Any]], tools: Any, effort: str) -> str:
    """Writes a conversation as Mistral describes the version, without a template."""
    asked = [at for at, message in enumerate(messages) if message["role"] == "user"]
    tools_at = asked[0] if version >= 13 else asked[-1]
    system = "".join(f"{m['content']}\n\n" for m in messages if m["role"] == "system")
    out = "<s>"
    for at, message in enumerate(messages):
        content = text_of(message.get("content"))
        match message["role"]:
            case "system":
                out += f"[SYSTEM_PROMPT]{content}[/SYSTEM_PROMPT]" if version >= 7 else ""
            case "user":
                out += f"[AVAILABLE_TOOLS]{dumped(tools)}[/AVAILABLE_TOOLS]" * (
                    bool(tools) and at == tools_at
                )
                if version >= 15 and at == asked[0]:
                    out += f"[MODEL_SETTINGS]{dumped({'reasoning_effort': effort})}"
                    out += "[/MODEL_SETTINGS]"
                before = system if version == 3 and at == asked[-1] else ""
                out += f"[INST]{before}{content}[/INST]"
            case "assistant":
                if version >= 13 and "reasoning_content" in message:
                    out += f"[THINK]{message['reasoning_content']}[/THINK]"
                out += content.rstrip(" ") + calls(version, message.get("tool_calls")) + "</s>"
            case "tool":
                out += result(version, message["tool_call_id"], content)
    return out


def calls(version: int, found: list[dict[str, Any]] | None) -> str:
    if not found:
        return ""
    if version < 11:
        items = [
            {"name": c["function"]["name"], "arguments": c["function"]["arguments"], "id": c["id"]}
            for c in found
        ]
        return f"[TOOL_CALLS]{dumped(items)}"
    identity = "[CALL_ID]{}" if version == 11 else ""
    return "".join(
        f"[TOOL_CALLS]{c['function']['name']}{identity.format(c['id'])}"
        f"[ARGS]{dumped(c['function']['arguments'])}"
        for c in found
    )


def result(version: int, call_id: str, content: str) -> str:
    if version == 3:
        value = json.loads(content) if content.startswith("{") else content
        return f"[TOOL_RESULTS]{dumped({'content': value, 'call_id': call_id})}[/TOOL_RESULTS]"
    identity = f"{call_id}[TOOL_CONTENT]" if version < 13 else ""
    return f"[TOOL_RESULTS]{identity}{content}[/TOOL_RESULTS]"


@pytest.fixture(scope="module")
def templates() -> Iterator[dict[int, ChatTemplate]]:
    made = {
        version: ChatTemplate(mistral_template(version), special_tokens=SPECIAL)
        for version in VERSIONS
    }
    yield made
    for template in made.values():
        template.close()


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("version", VERSIONS)
def test_each_version(
    templates: dict[int, ChatTemplate], version: int, turns: str, tools: Any
) -> None:
    messages = TURNS[turns]
    got = templates[version].render(messages, tools=tools)
    assert got == written(version, messages, tools, "none")
    got = templates[version].render(messages, tools=tools, extra={"reasoning_effort": "high"})
    assert got == written(version, messages, tools, "high")


def test_published_text_of_a_conversation(templates: dict[int, ChatTemplate]) -> None:
    """The order of the parts, as Mistral's own tests have it."""
    got = templates[15].render(TURNS["calls"][:4], tools=TOOLS, extra={"reasoning_effort": "high"})
    assert got.startswith("<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][AVAILABLE_TOOLS][{")
    middle = (
        '[/AVAILABLE_TOOLS][MODEL_SETTINGS]{"reasoning_effort": "high"}[/MODEL_SETTINGS][INST]U1'
    )
    assert middle in got
    assert got.endswith(
        '[TOOL_CALLS]F1[ARGS]{"city": "Köln", "n": [1, null]}[TOOL_CALLS]F2[ARGS]{}</s>'
        '[TOOL_RESULTS]{"t": 3}[/TOOL_RESULTS]'
    )


def test_other_roles_are_refused(templates: dict[int, ChatTemplate]) -> None:
    for template in templates.values():
        with pytest.raises(RequestError, match="the role must be"):
            template.render([{"role": "critic", "content": "no"}])


def test_versions() -> None:
    found = {
        name: find_version(b'{"config": {"pattern": "x", "version" : "%s"}}' % name.encode())
        for name in ("v1", "v3", "v7", "v8", "v11", "v14", "v99", "w7", "v99999")
    }
    expected = {"v3": 3, "v7": 7, "v8": 7, "v11": 11, "v14": 13, "v99": 15}
    assert found == dict.fromkeys(found) | expected
    hidden = json.dumps({"vocab": [{"token_str": '"version": "v3"'}], "version": "v13"}).encode()
    assert find_version(hidden) == 13


def test_a_directory_with_only_tekken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tekken_file(learned_ranks(), pattern=r"\s*\S+|\s+", version="v11")
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    caplog.set_level("INFO")
    text = TextLoading(tmp_path).result()
    try:
        assert text.template is not None
        assert text.chat_problem.result() is None
        assert "the built-in one of Mistral's v11 is used" in caplog.text
        prompt = text.template.render(TURNS["question"])
        ids = text.tokenizer.encode(prompt, add_special_tokens=False)
        assert ids[:2] == [1, 3] and ids[-1] == 4
    finally:
        text.close()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "mine"}))
    assert read_text_config(tmp_path).chat_template == "mine"
    (tmp_path / "chat_template.json").unlink()
    file["config"]["version"] = "v2"
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    config = read_text_config(tmp_path)
    assert config.chat_template is None
    assert "without a chat template" in config.notes[0]
