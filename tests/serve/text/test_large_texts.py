"""Large texts are encoded in a child process, with the same ids."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from serve.engine.request_limits import PIECE_CHARS, RequestLimits, check_text
from serve.errors import (
    ContextLengthError,
    EngineStoppedError,
    GenerationError,
    OverloadedError,
    RequestError,
)
from serve.text import large_texts
from serve.text.tokenizer import Tokenizer
from tests.support.engine.tokenizer_files import make_directory

TEXT = "Once upon a time </s><s> there were 3 naïve\tfoxes. 👍\n" * 40


@pytest.fixture(params=["bytes", "metaspace", "never", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(make_directory(request.param, tmp_path))


def test_the_ids_are_those_of_this_process(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode_all() -> list[list[int]]:
        return [
            tokenizer.encode(TEXT),
            tokenizer.encode(TEXT, add_special_tokens=False),
            tokenizer.encode_plain(TEXT),
        ]

    here = encode_all()
    assert not tokenizer.worker_bytes()
    monkeypatch.setattr(large_texts, "LARGE_CHARS", 20)
    assert encode_all() == here
    assert tokenizer.worker_bytes()
    tokenizer.close()
    assert not tokenizer.worker_bytes()
    with pytest.raises(EngineStoppedError):
        tokenizer.encode(TEXT)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Returns a tokenizer for which every text of more than 100 characters is large."""
    monkeypatch.setattr(large_texts, "LARGE_CHARS", 100)
    return Tokenizer.load(make_directory("bytes", tmp_path))


def test_the_process_ends_when_there_are_no_large_texts(
    large: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_texts, "IDLE_S", 0.05)
    ids = large.encode(TEXT)
    due_s = time.monotonic() + 10
    while large.worker_bytes():
        assert time.monotonic() < due_s
        time.sleep(0.01)
    assert large.encode(TEXT) == ids
    large.close()


def test_a_text_that_takes_too_much_memory_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_texts, "MEMORY_BYTES", 96 << 20)
    tokenizer = Tokenizer.load(make_directory("bytes", tmp_path))
    with pytest.raises(RequestError, match="cannot encode the text") as error:
        tokenizer.encode("0123456789" * 200_000)
    assert error.value.param == "prompt"
    assert len(tokenizer.encode("a " * 100_000)) >= 100_000
    tokenizer.close()


@pytest.mark.parametrize("problem", ["killed", "starts slowly"])
def test_what_the_text_does_not_cause_is_no_error_of_it(
    problem: str, large: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system ends this process first where memory is short. The client may try again."""
    worker = large._codec.large._worker
    if problem == "killed":
        large.encode(TEXT)
        assert worker._child is not None
        os.kill(worker._child.process.pid, signal.SIGSTOP)
        threading.Timer(0.1, worker._child.process.kill).start()
    else:
        monkeypatch.setattr("serve.sandbox.worker.STARTUP_TIMEOUT_S", 0.0)
    match = "process ended" if problem == "killed" else "did not start within 0 s"
    with pytest.raises(OverloadedError, match=match):
        large.encode(TEXT)
    monkeypatch.undo()
    monkeypatch.setattr(large_texts, "LARGE_CHARS", 100)
    assert large.encode(TEXT)
    large.close()


def test_closing_does_not_wait_for_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_directory("bytes", tmp_path))
    raised: list[BaseException] = []

    def encode() -> None:
        try:
            tokenizer.encode("0123456789" * 800_000)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=encode)
    thread.start()
    due_s = time.monotonic() + 10
    while not tokenizer.worker_bytes():
        assert time.monotonic() < due_s
        time.sleep(0.01)
    began_s = time.monotonic()
    tokenizer.close()
    thread.join()
    assert isinstance(raised[0], EngineStoppedError) and time.monotonic() - began_s < 1.0


def test_a_file_that_has_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_texts, "LARGE_CHARS", 100)
    path = shutil.copytree(make_directory("bytes", tmp_path), tmp_path / "copy")
    large = Tokenizer.load(path)
    file = path / "tokenizer.json"
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(GenerationError, match="has changed since the model was loaded"):
        large.encode(TEXT)
    assert large.encode("a")
    large.close()


def test_a_file_that_is_gone_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shutil.copytree(make_directory("bytes", tmp_path), tmp_path / "copy")
    large = Tokenizer.load(path)
    shutil.rmtree(path)
    ids = large.encode(TEXT)
    monkeypatch.setattr(large_texts, "LARGE_CHARS", 100)
    assert large.encode(TEXT) == ids
    assert large.worker_bytes()
    large.close()


def test_the_process_outlives_the_thread_that_started_it(large: Tokenizer) -> None:
    thread = threading.Thread(target=large.encode, args=(TEXT,))
    thread.start()
    thread.join()
    child = large._codec.large._worker._child
    assert large.encode(TEXT)
    assert child is not None and large._codec.large._worker._child is child
    large.close()


def test_nothing_stays_after_close(large: Tokenizer) -> None:
    files = len(os.listdir("/proc/self/fd"))
    large.encode(TEXT)
    large.close()
    with pytest.raises(EngineStoppedError):
        large.encode(TEXT)
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)
    assert len(os.listdir("/proc/self/fd")) == files - 1


def test_the_normalized_text_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(make_directory("bytes", tmp_path))
    codec = tokenizer._codec.large
    monkeypatch.setattr(codec, "_max_growth", 18.0)
    monkeypatch.setattr(codec, "_growth", lambda text: 3.0)
    monkeypatch.setattr(large_texts, "LARGE_CHARS", 3000)
    assert not codec.has("a" * 999) and codec.has("a" * 1001) and codec.has("a" * 3001)


def test_texts_are_counted_in_pieces_before_they_are_encoded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_directory("bytes", tmp_path))
    limits = RequestLimits(
        max_model_len=2 * PIECE_CHARS, vocab_size=1000, max_num_waiting=1, max_num_seqs=1
    )
    encoded: list[int] = []
    encode = tokenizer.encode

    def counted(text: str, *, add_special_tokens: bool) -> list[int]:
        encoded.append(len(text))
        return encode(text, add_special_tokens=add_special_tokens)

    object.__setattr__(tokenizer, "encode", counted)
    with pytest.raises(ContextLengthError, match=f"at least {2 * PIECE_CHARS + 1} tokens"):
        check_text("7" * (9 * PIECE_CHARS), tokenizer, limits)
    assert encoded == [PIECE_CHARS] * 3
    check_text("7" * (2 * PIECE_CHARS), tokenizer, limits)
    check_text("7" * (9 * PIECE_CHARS), tokenizer, limits, is_cut=True)
    assert len(encoded) == 3, "these may fit"
    with pytest.raises(RequestError, match=f"lone surrogate at character {8 * PIECE_CHARS}"):
        check_text("7" * (8 * PIECE_CHARS) + "\ud800" * PIECE_CHARS, tokenizer, limits)
