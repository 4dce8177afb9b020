"""Loads what turns requests into token ids, in a thread beside the one that loads the weights.

The tokenizer's file is tried in a child process first, and the chat template is tried on plain
conversations, so that what cannot work is known at the start.
"""

from __future__ import annotations

import filecmp
import logging
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from serve.engine.chat_prompt import make_chat_template
from serve.errors import ConfigError
from serve.text.chat_template import ChatTemplate
from serve.text.rank_patterns import find_tokenizer
from serve.text.tokenizer import Tokenizer
from serve.text.tokenizer_config import TextConfig, read_text_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedText:
    """chat_problem: why no chat can be rendered, None if one can; completions do not need it. It is
    known a little later than the rest."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    chat_problem: Future[str | None]

    def close(self) -> None:
        self.tokenizer.close()
        if self.template is not None:
            self.template.close()


def _load(path: Path, model: Path, kept: Path | None) -> tuple[LoadedText, TextConfig]:
    config = read_text_config(path)
    for note in config.notes:
        logger.info("%s", note)
    template = make_chat_template(config)  # its process starts beside the tokenizer's
    try:
        tokenizer = Tokenizer.load(path, config, model=model, kept=kept)
    except BaseException:
        if template is not None:
            template.close()
        raise
    return LoadedText(tokenizer, template, Future()), config


def _find_problem(text: LoadedText, config: TextConfig) -> str | None:
    if text.template is None:
        return "the model has no chat template"
    problem = text.template.find_problem()
    if problem is None:
        return None
    problem = f"{config.template_file}: {problem}"
    logger.warning("chats cannot be served, but completions can: %s", problem)
    return problem


def check_same_ids(path: Path, tokenizer: Tokenizer, draft: Path) -> None:
    """Raises ConfigError unless the draft model's tokenizer gives tokens the ids of the engine's,
    which is that of `path`."""
    files = find_tokenizer(path), find_tokenizer(draft)
    if filecmp.cmp(*files, shallow=False):
        return
    other = Tokenizer.load(draft)
    try:
        if not tokenizer.has_ids_of(other):
            raise ConfigError(
                f"draft_model: {files[1]} gives tokens other ids than {files[0]}; a draft model has"
                " the model's tokenizer"
            )
    finally:
        other.close()


class TextLoading:
    """Tokenizer and chat template of a directory while they are loaded. model: the model's
    directory, if it is another. kept: where trials are kept for the next start; None: nowhere."""

    def __init__(self, path: Path, model: Path | None = None, *, kept: Path | None = None) -> None:
        self._loaded: Future[LoadedText] = Future()
        # A daemon thread: a process that ends does not wait for it.
        threading.Thread(
            target=self._load, args=(path, model or path, kept), name="mergestep-text", daemon=True
        ).start()

    def _load(self, path: Path, model: Path, kept: Path | None) -> None:
        try:
            text, config = _load(path, model, kept)
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(text)
        try:
            text.chat_problem.set_result(_find_problem(text, config))
        except BaseException as error:  # the template has been closed, for example
            text.chat_problem.set_exception(error)

    def check(self) -> None:
        """Raises the error if it has failed by now: ModelLoadError names the wrong file."""
        if self._loaded.done():
            self._loaded.result()

    def is_done(self, timeout_s: float) -> bool:
        """Waits for the end of loading. Returns whether it has ended, in whatever way."""
        return bool(wait([self._loaded], timeout_s).done)

    def result(self) -> LoadedText:
        return self._loaded.result()

    def discard(self) -> None:
        """Frees what it loads, now or later."""
        self._loaded.add_done_callback(_close)


def _close(loaded: Future[LoadedText]) -> None:
    if loaded.exception() is None:
        loaded.result().close()
