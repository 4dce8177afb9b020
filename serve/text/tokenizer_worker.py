"""Tries a tokenizer's file, or encodes large texts with it: a script for child processes.

serve/sandbox/worker.py runs it. The file is untrusted: its regular expressions can take exponential
time, and the libraries can use any amount of memory.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib
import os
import re
import signal
import sys
import time
from array import array
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from serve.text.rank_file import describe_ranks, encoded
from serve.text.tokenizer_file import (
    Refused,
    check_description,
    is_panic,
    load_fast,
    load_sentencepiece,
    read_description,
    regexes_of,
    sentencepiece_growth,
)

MAX_TOKEN_CHARS = 4096
_MAX_MESSAGE_CHARS = 300
_PDEATHSIG = 1  # of <sys/prctl.h>

# Trials: runs of one character, each run ended by another, so that a pattern backtracks. A nested
# repetition takes 2^24 steps for a run of 24 characters, for which the library panics.
_CHARS = "aA1 \n\t!-_'é字\u0301👍\ufdfa"
_END = "\x01"
_SHORT_RUNS = (16, 24, 32, 40)
_SHORT_TRIAL_S = 0.1
# Then a run doubles until it takes as long as this; a run of _TIMES its length tells the power.
_FIRST_RUN, _LAST_RUN = 64, 1 << 16
_CLEAR_S = 0.001  # most tokenizers take 0.25 to 0.75 us for a character
_TIMES = 4
_SQUARE, _CUBE = 8.0, 40.0  # ratios of the times: 4, 16 or 64, but for caches and noise
_MORE_TRIALS = 3
_MIN_SQUARE_S = 1e-10  # the memory of a longer text has made up to 4e-11 of it
_LONG_TRIAL_S = 3.0
_MAX_CHAR_S = 0.0015  # for each character of a run
_KINDS = (r"[^\W\d_]", r"\d", r"\s", r"[^\w\s]")
_MAX_LITERALS = 32
# Parts of patterns that stand for characters without holding one.
_CLASS = re.compile(r"\\[pP]\{[^}]*\}|\\[xu](?:\{[^}]*\}|[0-9a-fA-F]+)|\[:[^]]*:\]")
_MEMBERS = "".join(map(chr, [*range(0x80, 0xD800, 4), *range(0xE000, 0x20000, 8)]))


def check_tokens(tokens: Collection[str]) -> None:
    longest = max(map(len, tokens), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise Refused(f"has a token of {longest} characters; at most {MAX_TOKEN_CHARS} can be used")


def try_texts(
    encode: Callable[[str], object], tokens: Collection[str], chars: str = "", end: str = ""
) -> dict[str, float]:
    """Encodes texts that patterns and long tokens make slow. Refuses what takes too long. chars:
    those of patterns, beside the usual ones. end: ends each text, since a pattern without its last
    character is not even tried.

    Returns what takes the square of a run's length: the class of its characters, as a pattern, and
    the seconds for each square of a character. A text that the library cannot encode is a request's
    error later.
    """
    chars = "".join(dict.fromkeys(_CHARS + chars))
    for char in chars:
        text = "".join(char * run + _END for run in _SHORT_RUNS)
        if _seconds(encode, text + _END + end, _SHORT_TRIAL_S) is None:
            raise Refused(f"cannot split {len(text)} characters such as {char!r}")
    squares: dict[str, float] = {}
    for text in (*chars, *sorted(filter(None, tokens), key=len)[-2:]):
        seconds = _square_seconds(encode, text, _END + end)
        if seconds and len(text) == 1:
            kind = next((kind for kind in _KINDS if re.match(kind, text)), re.escape(text))
            squares[kind] = max(squares.get(kind, 0.0), seconds)
    return squares


def _square_seconds(encode: Callable[[str], object], text: str, end: str) -> float:
    """Returns the seconds for the square of a character in runs of a text, 0.0 if the time grows
    like the length. Refuses what grows like its cube."""

    def measure(size: int) -> float:
        run = text * -(-size // len(text))
        took_s = _seconds(encode, run[:size] + end, _LONG_TRIAL_S)
        if took_s is None or took_s > _MAX_CHAR_S * size:
            raise Refused(f"takes too long to split {size} characters such as {text[:4]!r}")
        return took_s

    size = _FIRST_RUN
    while (took_s := measure(size)) < _CLEAR_S or (took_s := measure(size)) < _CLEAR_S:
        if size >= _LAST_RUN:
            return 0.0
        size *= 2
    longer_s = measure(_TIMES * size)
    if longer_s > _SQUARE * took_s:  # or another process was in the way
        longer_s = min(longer_s, measure(_TIMES * size))
    for _ in range(_MORE_TRIALS):  # a refusal needs more than one moment of a busy machine
        if longer_s > _CUBE * took_s:
            took_s = max(took_s, measure(size))  # it may have become slower since
            longer_s = min(longer_s, measure(_TIMES * size))
    if longer_s > _CUBE * took_s:
        raise Refused(f"takes the cube of a run's length to split characters such as {text[:4]!r}")
    seconds = longer_s / (_TIMES * size) ** 2
    return seconds if longer_s > _SQUARE * took_s and seconds > _MIN_SQUARE_S else 0.0


def _chars_of(regexes: Iterable[str]) -> str:
    """Returns characters that a file's patterns name, by themselves or by a class."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    regexes = list(regexes)
    chars = dict.fromkeys("".join(map(_literals, regexes))[:_MAX_LITERALS])
    classes = dict.fromkeys(found for regex in regexes for found in _CLASS.findall(regex))
    for name in list(classes)[:_MAX_LITERALS]:
        for members in (_CHARS, _MEMBERS):
            try:
                found = Split(Regex(name), "removed", invert=True).pre_tokenize_str(members)
            except Exception:  # a part of a pattern need not be one
                break
            if found:
                chars[found[0][0][0]] = None
                break
    return "".join(chars)


def _literals(regex: str) -> str:
    """Returns the characters of a pattern that stand for themselves, and perhaps a few more."""
    return re.sub(r"\\[pP]\{[^}]*\}|\\.|\(\?[a-zA-Z:=!<>-]*|[][(){}?*+|^$.]", "", regex)


def _seconds(encode: Callable[[str], object], text: str, limit_s: float) -> float | None:
    """Returns the processor's time for a text, None after a panic."""
    began_s = time.process_time()
    try:
        encode(text)
    except Exception:  # for example a character that the vocabulary does not have
        pass
    except BaseException as error:
        if not is_panic(error):
            raise
        return None
    took_s = time.process_time() - began_s
    if took_s > limit_s:
        raise Refused(f"takes {took_s:.2f} s to split {len(text)} characters such as {text[:4]!r}")
    return took_s


def prepare(setup: dict[str, Any]) -> dict[str, Any]:
    """Imports the library before the limits apply. Makes the system end a trial with the server's
    thread that started it; the encoder outlives that, and ends with its standard input."""
    if "file" not in setup:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != setup["parent"]:  # it has ended before
            sys.exit()
    importlib.import_module(setup["library"])
    return setup


def start(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the function from {"file", "sha256", "declared", "names", "rules"} to {"error"} or
    to {"growth", "squares", "decoder"}: see check_description and try_texts. With a file in the
    setup it returns that of `make_encoder`."""
    if "file" in setup:
        return make_encoder(setup)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        try:
            return _check(question)
        except Refused as error:
            return {"error": str(error)}
        except MemoryError:
            return {"error": "needs too much memory"}
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            return {"error": f"cannot be used: {error}"[:_MAX_MESSAGE_CHARS]}

    return answer


def make_encoder(file: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the function from {"text", "kind"} to {"ids"} (uint32, base64), to {"error"}, or to
    {"broken"} if the file is another one.

    file: has "file", "sha256", "declared", "names" and "rules". kind: "special" adds the tokens
    around a text, "bare" does not, and "plain" has no special tokens in it either. For
    sentencepiece it is "first" or "rest".
    """
    try:
        data = _read(file)
    except Refused as error:
        problem = str(error)
        return lambda question: {"broken": problem}
    if file["library"] == "sentencepiece":
        first, rest = load_sentencepiece(data)

        def encode(text: str, kind: str) -> list[int]:
            ids: list[int] = (first if kind == "first" else rest).encode(text)
            return ids
    else:
        if file["rules"] is not None:
            data = encoded(describe_ranks(data, file["rules"]))
        fast = load_fast(data, file["declared"], file["names"])

        def encode(text: str, kind: str) -> list[int]:
            fast.encode_special_tokens = kind == "plain"
            return list(fast.encode_batch_fast([text], add_special_tokens=kind == "special")[0].ids)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        try:
            ids = array("I", encode(question["text"], question["kind"]))
        except MemoryError:
            return {"error": "it takes too much memory"}
        except BaseException as error:
            if is_panic(error):
                return {"error": "it cannot be split, or not in the memory for it"}
            if not isinstance(error, Exception):
                raise
            return {"error": str(error)[:_MAX_MESSAGE_CHARS]}
        return {"ids": base64.b64encode(ids.tobytes()).decode()}

    return answer


def _read(question: dict[str, Any]) -> bytes:
    data = Path(question["file"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != question["sha256"]:
        raise Refused("has changed since it was read")
    return data


def _check(question: dict[str, Any]) -> dict[str, Any]:
    data = _read(question)
    rules = question["rules"]
    if rules is None and question["file"].endswith(".model"):
        return _check_sentencepiece(data)
    if rules is None:
        description = read_description(data)
    else:
        description = describe_ranks(data, rules)
        data = encoded(description)
    growth = check_description(description)
    fast = load_fast(data, question["declared"], question["names"])
    tokens = fast.get_vocab(with_added_tokens=True)
    check_tokens(tokens)
    regexes = list(regexes_of(description))
    end = "".join(dict.fromkeys("".join(map(_literals, regexes))))
    squares = try_texts(fast.encode, tokens, _chars_of(regexes), end)
    return {"growth": growth, "squares": squares, "decoder": description.get("decoder")}


def _check_sentencepiece(data: bytes) -> dict[str, Any]:
    growth = sentencepiece_growth(data)
    first, rest = load_sentencepiece(data)
    tokens = [str(first.id_to_piece(index)) for index in range(first.vocab_size())]
    check_tokens(tokens)
    try_texts(rest.encode, tokens)
    return {"growth": growth, "squares": try_texts(first.encode, tokens)}
