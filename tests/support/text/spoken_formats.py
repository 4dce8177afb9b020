"""How models of each format write calls, and checkpoints whose chat templates are of a format.

The texts are written by hand and not by the grammars, so that both can be compared with them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serve.config import default_model_path
from serve.text.chat_parser.formats import REASONING_FORMATS, TOOL_FORMATS

Calls = Sequence[tuple[str, dict[str, Any]]]

TEMPLATE = """{# MARKS #}{{ bos_token }}
{%- if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.reasoning_content }}
{{- message.content }}{% for call in message.tool_calls %}
CALL {{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}{% if message.tool_call_id %} OF {{ message.tool_call_id }}{% endif %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def make_model(path: Path, tools: str, reasoning: str = "") -> Path:
    """Makes a copy of the embedded model whose chat template has the marks of the formats."""
    shutil.copytree(default_model_path(), path)
    row = TOOL_FORMATS[tools]
    marks = [row.marks[0], *row.needs]
    if reasoning:
        thinking = REASONING_FORMATS[reasoning]
        marks += [thinking.marks[0], *thinking.needs]
    text = TEMPLATE.replace("MARKS", " ".join(marks))
    (path / "chat_template.jinja").write_text(text)
    return path


def spoken(tools: str, calls: Calls) -> str:
    """Returns calls as a model of this format writes them."""
    return _SPOKEN[tools](calls)


def said(tools: str, text: str) -> str:
    """Returns a text as a model of this format answers with it."""
    return f"<|channel|>final<|message|>{text}" if tools == "openai" else text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _json_calls(calls: Calls, key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: arguments}) for name, arguments in calls]


def _each(begin: str, end: str, made: Callable[[str, dict[str, Any]], str]) -> Any:
    return lambda calls: "".join(
        f"{begin}{made(name, arguments)}{end}" for name, arguments in calls
    )


def _block(begin: str, end: str, made: Callable[[str, dict[str, Any]], str], join: str = "") -> Any:
    return lambda calls: begin + join.join(made(name, values) for name, values in calls) + end


def _json_list(begin: str, end: str = "") -> Any:
    return lambda calls: f"{begin}[{', '.join(_json_calls(calls))}]{end}"


def _tags(name: str, arguments: dict[str, Any], wrap: str = "") -> str:
    pairs = [f"<parameter={k}>{wrap}{_text(v)}{wrap}</parameter>\n" for k, v in arguments.items()]
    return f"<function={name}>\n{''.join(pairs)}</function>"


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _glm(name: str, arguments: dict[str, Any]) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"{name}\n{''.join(pairs)}"


def _invoke(name: str, arguments: dict[str, Any]) -> str:
    pairs = (f'<parameter name="{k}">{_text(v)}</parameter>\n' for k, v in arguments.items())
    return f'<invoke name="{name}">\n{"".join(pairs)}</invoke>\n'


def _dsml(name: str, arguments: dict[str, Any]) -> str:
    pairs = (
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{_text(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{"".join(pairs)}</｜DSML｜invoke>\n'


def _gemma(quote: str) -> Callable[[str, dict[str, Any]], str]:
    def written(value: Any) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(written, value))}]"
        return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)

    def made(name: str, arguments: dict[str, Any]) -> str:
        pairs = (f"{key}:{written(value)}" for key, value in arguments.items())
        return f"call:{name}{{{','.join(pairs)}}}"

    return made


def _cohere(calls: Calls) -> str:
    made = [
        json.dumps({"tool_call_id": str(i), "tool_name": name, "parameters": arguments})
        for i, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>[{', '.join(made)}]<|END_ACTION|>"


def _kimi(calls: Calls) -> str:
    made = (
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(made)}<|tool_calls_section_end|>"


def _harmony(calls: Calls) -> str:
    ((name, arguments),) = calls
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
    )


_SEP, _BEGIN, _END = "<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_PYTHONIC = _block("[", "]", _python, ", ")
_SPOKEN: dict[str, Callable[[Calls], str]] = {
    "hermes": lambda calls: "\n".join(
        f"<tool_call>\n{text}\n</tool_call>" for text in _json_calls(calls)
    ),
    "llama3_json": lambda calls: "; ".join(_json_calls(calls, "parameters")),
    "llama4_json": lambda calls: "".join(_json_calls(calls, "parameters")),
    "llama4_pythonic": _PYTHONIC,
    "pythonic": _PYTHONIC,
    "lfm2": _block("<|tool_call_start|>[", "]<|tool_call_end|>", _python, ", "),
    "olmo3": _block("<function_calls>\n", "\n</function_calls>", _python, "\n"),
    "mistral": _json_list("[TOOL_CALLS] "),
    "mistral_args": _each("[TOOL_CALLS]", "", lambda n, a: f"{n}[ARGS]{json.dumps(a)}"),
    "qwen3_coder": _each("<tool_call>\n", "\n</tool_call>", lambda n, a: _tags(n, a, "\n")),
    "seed_oss": _each("<seed:tool_call>\n", "\n</seed:tool_call>", _tags),
    "glm45": _each("<tool_call>", "</tool_call>", _glm),
    "minimax_m2": _block("<minimax:tool_call>\n", "</minimax:tool_call>", _invoke),
    "deepseek_v3": _block(
        _BEGIN,
        _END,
        lambda n, a: f"{_CALL_BEGIN}function{_SEP}{n}\n```json\n{json.dumps(a)}\n```{_CALL_END}",
        "\n",
    ),
    "deepseek_v31": _block(
        _BEGIN, _END, lambda n, a: f"{_CALL_BEGIN}{n}{_SEP}{json.dumps(a)}{_CALL_END}"
    ),
    "deepseek_v32": _block("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>", _dsml),
    "kimi_k2": _kimi,
    "gemma4": _each("<|tool_call>", "<tool_call|>", _gemma('<|"|>')),
    "functiongemma": _each("<start_function_call>", "<end_function_call>", _gemma("<escape>")),
    "granite": _json_list("<|tool_call|>"),
    "phi4_mini": _json_list("<|tool_call|>", "<|/tool_call|>"),
    "phi4_mini_json": _json_list("functools"),
    "hunyuan_a13b": _json_list("<tool_calls>", "</tool_calls>"),
    "cohere_command3": _cohere,
    "apertus": _block(
        "<|tools_prefix|>[", "]<|tools_suffix|>", lambda n, a: json.dumps({n: a}), ", "
    ),
    "internlm": _each(
        "<|action_start|><|plugin|>\n",
        "<|action_end|>",
        lambda n, a: json.dumps({"name": n, "parameters": a}),
    ),
    "openai": _harmony,
}
