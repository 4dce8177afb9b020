"""What a tokenizer's trial has found is kept for the next start, and no stranger can write it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from serve import LLM, regular_file
from serve.errors import ModelLoadError
from serve.read_ahead import records_folder
from serve.text import kept_trials, tokenizer_check
from serve.text.tokenizer import Tokenizer
from tests.support.engine import tokenizer_pipelines as make
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.tokenizer_files import write_config
from tests.support.text.trials import forget

ANSWER = {"growth": 18.0, "squares": {r"\d": 1e-9}, "decoder": {"type": "ByteLevel"}}
KEY = "5" * 64


class Trials:
    """Stands for the child process. num_asked: how often it was asked."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.num_asked = 0

    def __call__(self, question: dict[str, Any], size_bytes: int) -> dict[str, Any]:
        self.num_asked += 1
        return self.answer


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    monkeypatch.setattr(tokenizer_check, "MIN_FILE_BYTES", 0)
    made = Trials(ANSWER)
    monkeypatch.setattr(tokenizer_check, "_ask", made)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = write_config(tmp_path / "model") / "tokenizer.json"
    path.write_text(json.dumps(make.bytes_state()), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "packed"


def check(
    monkeypatch: pytest.MonkeyPatch, file: Path, folder: Path | None, **more: Any
) -> tokenizer_check.CheckedFile:
    """Checks a file as a new process does."""
    forget(monkeypatch)
    return tokenizer_check.check_file(file, kept=folder, **more)


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def test_the_next_start_has_the_same_answer(
    trials: Trials, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = check(monkeypatch, file, folder)
    assert check(monkeypatch, file, folder) == first and trials.num_asked == 1
    (record,) = records(folder)
    assert record.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    moved = file.rename(file.with_name("moved.json"))  # its content counts
    assert check(monkeypatch, moved, folder).limits == first.limits and trials.num_asked == 1


def test_a_real_trial_is_kept(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_check, "MIN_FILE_BYTES", 0)
    forget(monkeypatch)
    ids = Tokenizer.load(file.parent, kept=folder).encode("naïve café 123")
    forget(monkeypatch)
    monkeypatch.setattr(tokenizer_check, "_ask", None)
    tokenizer = Tokenizer.load(file.parent, kept=folder)
    assert tokenizer.encode("naïve café 123") == ids and tokenizer.pieces is not None


@pytest.mark.parametrize("change", ["content", "declared", "names", "library", "code", "python"])
def test_anything_else_is_tried_again(
    change: str, trials: Trials, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, file, folder)
    more: dict[str, Any] = {}
    if change == "content":
        file.write_text(file.read_text() + " ")
    elif change == "declared":
        more["declared"] = {"5": {"content": "x"}}
    elif change == "names":
        more["names"] = ("<s>",)
    elif change == "library":
        monkeypatch.setattr(kept_trials.importlib.metadata, "version", lambda name: "0")
    elif change == "code":
        monkeypatch.setattr(kept_trials, "_CODE", kept_trials._CODE[1:])
    else:
        monkeypatch.setattr(kept_trials.sys, "version", "4")
    check(monkeypatch, file, folder, **more)
    assert trials.num_asked == 2


def test_what_was_refused_is_tried_again(
    trials: Trials, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.answer = {"error": "has a decoder"}
    for count in (1, 2):
        with pytest.raises(ModelLoadError, match="has a decoder"):
            check(monkeypatch, file, folder)
        assert trials.num_asked == count and not folder.exists()


def test_nothing_is_kept_without_a_folder_or_of_small_files(
    trials: Trials, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, file, None)
    monkeypatch.setattr(tokenizer_check, "MIN_FILE_BYTES", 1 << 20)
    check(monkeypatch, file, folder)
    assert not folder.exists()


@pytest.mark.parametrize("whose", ["folder", "file", "link", "linked folder"])
def test_what_a_stranger_could_have_written_is_not_used(
    whose: str, trials: Trials, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, file, folder)
    (record,) = records(folder)
    if whose == "folder":
        folder.chmod(0o777)
    elif whose == "file":
        record.chmod(0o666)
    elif whose == "link":
        record.symlink_to(record.rename(folder.parent / "elsewhere"))
    else:
        folder.symlink_to(folder.rename(folder.parent / "elsewhere"))
    check(monkeypatch, file, folder)
    assert trials.num_asked == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("whose", ["folder", "file"])
def test_another_users_record_is_not_used(
    whose: str, trials: Trials, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, file, folder)
    os.chown(folder if whose == "folder" else records(folder)[0], 12345, 12345)
    check(monkeypatch, file, folder)
    assert trials.num_asked == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 5000,
        b'{"key": "other", "answer": {}}',
        json.dumps({"key": KEY, "answer": None}).encode(),
        json.dumps({"key": KEY, "answer": ANSWER | {"growth": 0.5}}).encode(),
        json.dumps({"key": KEY, "answer": ANSWER | {"growth": float("nan")}}).encode(),
        json.dumps({"key": KEY, "answer": ANSWER | {"growth": "1"}}).encode(),
        json.dumps({"key": KEY, "answer": ANSWER | {"squares": {"a": -1.0}}}).encode(),
        json.dumps({"key": KEY, "answer": ANSWER | {"squares": {"a" * 99: 1.0}}}).encode(),
        json.dumps({"key": KEY, "answer": ANSWER | {"squares": {"(": 1.0}}}).encode(),
        json.dumps({"key": KEY, "answer": ANSWER | {"more": 1}}).encode(),
        json.dumps({"key": KEY, "answer": ANSWER}).encode() + b" " * kept_trials.MAX_RECORD_BYTES,
    ],
)
def test_damaged_records_are_not_used(content: bytes, folder: Path) -> None:
    kept_trials.keep_answer(folder, KEY, ANSWER)
    assert kept_trials.kept_answer(folder, KEY) == ANSWER
    records(folder)[0].write_bytes(content)
    assert kept_trials.kept_answer(folder, KEY) is None


def test_the_records_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_file, "MAX_RECORDS", 3)
    for number in range(5):
        kept_trials.keep_answer(folder, str(number) * 64, ANSWER)
        os.utime(records(folder)[-1], ns=(number, number))
    assert [path.name[6] for path in records(folder)] == ["2", "3", "4"]
    big = ANSWER | {"decoder": "x" * kept_trials.MAX_RECORD_BYTES}
    kept_trials.keep_answer(folder, "9" * 64, big)
    assert len(records(folder)) == 3


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept_trials.keep_answer(tmp_path / "file" / "folder", KEY, ANSWER)
    assert kept_trials.kept_answer(tmp_path / "file" / "folder", KEY) is None


def test_the_folder_is_never_in_a_models_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record in a model that was copied from a stranger would be this user's own file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert records_folder("auto") == tmp_path / "xdg" / "mergestep" / "packed"
    assert records_folder("off") is None
    assert records_folder(str(tmp_path / "chosen")) == tmp_path / "chosen"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    assert records_folder("auto") is None


def test_an_engine_keeps_trials_where_it_keeps_packed_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_check, "MIN_FILE_BYTES", 0)
    model = str(checkpoint("llama"))
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2}
    forget(monkeypatch)
    with LLM(model, packed_cache="off", **settings):
        assert not folder.exists()
    forget(monkeypatch)
    with LLM(model, packed_cache=str(folder), **settings) as llm:
        ids = llm.tokenizer.encode("the quick brown fox")
    assert [path.name[:6] for path in records(folder)] == ["trial-"]
    forget(monkeypatch)
    monkeypatch.setattr(tokenizer_check, "_ask", None)
    with LLM(model, packed_cache=str(folder), **settings) as llm:
        assert llm.tokenizer.encode("the quick brown fox") == ids
