"""Chat templates of Mistral's tokenizers, for directories that have a tekken.json and no template.

Mistral publishes the format of a conversation as a version of its tokenizer. From v7 on system
messages have tokens of their own, from v11 on a call is a name and its arguments, from v13 on tools
come before the first question and results have no id, and v15 has settings of the model.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# A text in the file has its quotes escaped, so that only a key can match.
_VERSION = re.compile(rb'"version"\s*:\s*"v(\d{1,4})"')

_HEAD = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content or [] if part.type == 'text' -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro json(value) -%}
    {{- value if value is string else value | tojson -}}
{%- endmacro -%}
{{- bos_token -}}
{%- set ns = namespace(first=-1, last=-1, system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- set ns.last = loop.index0 -%}
        {%- if ns.first < 0 -%}
            {%- set ns.first = loop.index0 -%}
        {%- endif -%}
    {%- endif -%}
{%- endfor -%}
"""
_MESSAGES = """\
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        @SYSTEM@
    {%- elif message.role == 'user' -%}
        {%- if tools and loop.index0 == ns.@PLACE@ -%}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        @SETTINGS@
        {{- '[INST]' -}}
        @QUESTION@
        {{- text(message.content) + '[/INST]' -}}
    {%- elif message.role == 'assistant' -%}
        @THINKING@
        {{- text(message.content).rstrip(' ') -}}
        {%- if message.tool_calls -%}
            @CALLS@
        {%- endif -%}
        {{- eos_token -}}
    {%- elif message.role == 'tool' -%}
        @RESULT@
    {%- else -%}
        {{- raise_exception('the role must be system, user, assistant or tool') -}}
    {%- endif -%}
{%- endfor -%}
"""
_SYSTEM_APART = "{{- '[SYSTEM_PROMPT]' + text(message.content) + '[/SYSTEM_PROMPT]' -}}"
_SYSTEM_LATER = """\
{%- set ns.system = ns.system + text(message.content) + '\\n\\n' -%}"""
_SYSTEM_FIRST = """\
{%- if loop.index0 == ns.last -%}
            {{- ns.system -}}
        {%- endif -%}"""
_CALL_LIST = """\
{{- '[TOOL_CALLS][' -}}
            {%- for call in message.tool_calls -%}
                {{- '{"name": ' + (call.function.name | tojson) -}}
                {{- ', "arguments": ' + json(call.function.arguments) -}}
                {{- ', "id": ' + (call.id | tojson) if call.id -}}
                {{- '}' if loop.last else '}, ' -}}
            {%- endfor -%}
            {{- ']' -}}"""
_CALL_ARGS = """\
{%- for call in message.tool_calls -%}
                {{- '[TOOL_CALLS]' + call.function.name @IDENTITY@ -}}
                {{- '[ARGS]' + json(call.function.arguments) -}}
            {%- endfor -%}"""
_CALL_ID = "+ ('[CALL_ID]' + call.id if call.id else '')"
_RESULT_JSON = """\
{%- set content = text(message.content) -%}
        {%- set is_json = content.strip()[:1] in ['{', '['] -%}
        {{- '[TOOL_RESULTS]{"content": ' + (content if is_json else content | tojson) -}}
        {{- ', "call_id": ' + (message.tool_call_id | tojson) + '}[/TOOL_RESULTS]' -}}"""
_RESULT_ID = """\
{{- '[TOOL_RESULTS]' + (message.tool_call_id or '') + '[TOOL_CONTENT]' -}}
        {{- text(message.content) + '[/TOOL_RESULTS]' -}}"""
_RESULT = "{{- '[TOOL_RESULTS]' + text(message.content) + '[/TOOL_RESULTS]' -}}"
_THINKING = """\
{%- if message.reasoning_content is string -%}
            {{- '[THINK]' + message.reasoning_content + '[/THINK]' -}}
        {%- endif -%}"""
_SETTINGS = """\
{%- if loop.index0 == ns.first -%}
            {{- '[MODEL_SETTINGS]{"reasoning_effort": ' -}}
            {{- (reasoning_effort | default('none', true) | tojson) + '}[/MODEL_SETTINGS]' -}}
        {%- endif -%}"""


class _Format(NamedTuple):
    """The parts of a template that depend on the version."""

    system: str = _SYSTEM_APART
    question: str = ""
    place: str = "last"  # the question before which tools come
    settings: str = ""
    thinking: str = ""
    calls: str = _CALL_LIST
    result: str = _RESULT_ID


_AFTER_V11 = _CALL_ARGS.replace(" @IDENTITY@", "")
_FORMATS = {
    3: _Format(system=_SYSTEM_LATER, question=_SYSTEM_FIRST, result=_RESULT_JSON),
    7: _Format(),
    11: _Format(calls=_CALL_ARGS.replace("@IDENTITY@", _CALL_ID)),
    13: _Format(place="first", thinking=_THINKING, calls=_AFTER_V11, result=_RESULT),
    15: _Format(
        place="first", settings=_SETTINGS, thinking=_THINKING, calls=_AFTER_V11, result=_RESULT
    ),
}


def find_version(tekken: bytes) -> int | None:
    """Returns the newest version that is known and not above that of a tekken.json; None for none
    and for one before all that are known."""
    found = _VERSION.search(tekken)
    version = -1 if found is None else int(found.group(1))
    return max((known for known in _FORMATS if known <= version), default=None)


def mistral_template(version: int) -> str:
    """Returns the chat template of a version that `find_version` has returned."""
    parts = _FORMATS[version]
    messages = _MESSAGES
    for name, part in zip(parts._fields, parts, strict=True):
        messages = messages.replace(f"@{name.upper()}@", part)
    return _HEAD + messages
