"""Saves most of the child processes that an engine starts to try its tokenizer and its template.

Hundreds of tests load an engine with a copy of one of a few small files. Each child process takes
up to a second of a core; most tests have no use for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from serve.engine import text_loader
from serve.engine.text_loader import LoadedText
from serve.sandbox.worker import BoundedWorker
from serve.text import chat_template, tokenizer_check, tokenizer_worker
from serve.text.tokenizer_config import TextConfig

_ask: Callable[[dict[str, Any], int], dict[str, Any]] = tokenizer_check._ask
_find_problem: Callable[[LoadedText, TextConfig], str | None] = text_loader._find_problem
_answers: dict[str, dict[str, Any]] = {}
_good_templates: set[str] = set()


def _ask_once(question: dict[str, Any], size_bytes: int) -> dict[str, Any]:
    """Asks a child process, but not again about content that one has accepted."""
    kind = question["file"].rpartition(".")[2]
    key = json.dumps([kind, {name: question[name] for name in question if name != "file"}])
    if key not in _answers:
        answer = _ask(question, size_bytes)
        if "error" in answer:
            return answer
        _answers[key] = answer
    return _answers[key]


def _find_problem_once(text: LoadedText, config: TextConfig) -> str | None:
    """Tries a template unless it has rendered a conversation before."""
    key = json.dumps([config.chat_template, config.tool_template, config.named_tokens])
    if key in _good_templates:
        return None
    problem = _find_problem(text, config)
    if problem is None:
        _good_templates.add(key)
    return problem


class _LateWorker(BoundedWorker):
    def start(self) -> None:
        """The first conversation starts the child process."""


def save_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_check, "_ask", _ask_once)
    monkeypatch.setattr(text_loader, "_find_problem", _find_problem_once)
    monkeypatch.setattr(chat_template, "BoundedWorker", _LateWorker)


def _describe(question: dict[str, Any], size_bytes: int) -> dict[str, Any]:
    answer = tokenizer_worker.start({"parent": 0})
    return answer(json.loads(json.dumps(question)))


def skip_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks a file here, without the texts that a trial measures for most of a second, for tests
    of what a file means. tests/serve/text/test_tokenizer_check.py has the trials."""
    monkeypatch.setattr(tokenizer_check, "_ask", _describe)
    monkeypatch.setattr(tokenizer_check, "_accepted", {})  # other tests get answers of trials
    monkeypatch.setattr(tokenizer_worker, "try_texts", lambda *args: {})


def start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets templates start their child processes at once, for tests of where these end."""
    monkeypatch.setattr(chat_template, "BoundedWorker", BoundedWorker)


def try_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes skip_trials for a test."""
    monkeypatch.setattr(tokenizer_check, "_ask", _ask_once)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test meet the next tokenizer's file as the first one."""
    monkeypatch.setattr(tokenizer_check, "_accepted", {})
    monkeypatch.setitem(globals(), "_answers", {})
