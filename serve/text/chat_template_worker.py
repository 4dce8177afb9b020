"""Renders chat templates in a child process (serve/sandbox/worker.py).

A template is untrusted code. It runs in Jinja's sandbox under the limits of the child process.
Imports are minimal so that the process starts fast.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_MESSAGE_CHARS = 300


class GenerationBlock(Extension):
    """Ignores `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body, lineno=line)]


class SafeNamespace(Namespace):
    """A namespace that refuses names with a leading underscore."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values: dict[str, Any] = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace attribute may not begin with an underscore")


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def build_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = SafeNamespace
    return environment


def render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> dict[str, Any]:
    """Returns {"text": ...} or {"error": ...}; no template makes it raise."""
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if size > max_chars:
                return {"error": f"the rendered prompt is longer than {max_chars} characters"}
            pieces.append(piece)
    except MemoryError:
        return {"error": "rendering the chat template needs too much memory"}
    except RecursionError:
        return {"error": "the chat template recurses too deeply"}
    except Exception as exc:  # a template can raise anything, but fails only its request
        return {"error": describe(exc)}
    return {"text": "".join(pieces)}


def describe(exc: Exception) -> str:
    text = str(exc) or type(exc).__name__
    if not isinstance(exc, TemplateError):
        text = f"{type(exc).__name__}: {text}"
    return text[:MAX_MESSAGE_CHARS]


def compile_template(source: str) -> tuple[jinja2.Template | None, str]:
    try:
        return build_environment().from_string(source), ""
    except (MemoryError, RecursionError):
        return None, "the chat template is too large"
    except Exception as exc:  # every chat request reports it; completions keep working
        return None, f"the chat template does not compile: {describe(exc)}"


def prepare(setup: dict[str, Any]) -> dict[str, Any]:
    """Prepares nothing before the limits apply."""
    return setup


def start(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the renderer; setup has the templates, the special tokens and max_chars."""
    plain = with_tools = compile_template(setup["source"])
    if setup["tool_source"] is not None:
        with_tools = compile_template(setup["tool_source"])

    def answer(variables: dict[str, Any]) -> dict[str, Any]:
        template, problem = with_tools if variables["tools"] else plain
        if template is None:
            return {"error": problem}
        variables = {**setup["special_tokens"], **variables}
        return render(template, variables, setup["max_chars"])

    return answer
