"""Loads a tokenizer's file, checks what it may do with texts, and tries it.

serve/sandbox/worker.py runs this script in a child process before the server loads the file with
the same functions. The file is untrusted: its steps can make a text longer, its regular expressions
can take exponential time, and the libraries can use any amount of memory. Imports are minimal so
that the process starts fast.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib
import json
import re
import signal
import time
import unicodedata
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as FastTokenizer

MAX_VOCAB = 1 << 24
MAX_TOKEN_CHARS = 4096
MAX_STEPS = 128
MAX_CONTENT_CHARS = 64  # what a step may insert at one place
MAX_WORD_CHARS = 1000
MAX_SPECIAL_IDS = 256  # that a post-processor adds to a text
MAX_GROWTH = 1024.0
# What a regular expression matches may depend on text far away, so that the server cannot foresee
# the growth from a part of a text.
MAX_REGEX_GROWTH = 16.0
MAX_DECODER_JSON = 1 << 16
# These bytes follow a serialized model: protobuf merges them as
# normalizer_spec.add_dummy_prefix = false.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"

_INNER = ("normalizers", "pretokenizers", "decoders", "processors")
# The most characters that these make of one, also together; a test tries every character.
_FORMS = {"NFC": 3.0, "NFD": 4.0, "NFKC": 18.0, "NFKD": 18.0, "Lowercase": 2.0}
_FORMS["BertNormalizer"] = 4.0  # it has NFD
# And these every time: spaces around an ideograph, and a character for each byte.
_EVERY_TIME = {"BertNormalizer": 3.0, "ByteLevel": 4.0}
_MAX_MESSAGE_CHARS = 300
_PDEATHSIG = 1  # of <sys/prctl.h>
_NORMALIZER_SPEC, _PRECOMPILED_CHARSMAP = 3, 2  # fields of sentencepiece's ModelProto
_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}  # protobuf's wire types

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
_SQUARE, _CUBE = 8.0, 28.0  # ratios of the times, between 4 and 16 and between 16 and 64
_MIN_SQUARE_S = 1e-10  # the memory of a longer text has made up to 4e-11 of it
_LONG_TRIAL_S = 3.0
_MAX_CHAR_S = 0.0015  # for each character of a run
_KINDS = (r"[^\W\d_]", r"\d", r"\s", r"[^\w\s]")
_MAX_LITERALS = 32
# Parts of patterns that stand for characters without holding one.
_CLASS = re.compile(r"\\[pP]\{[^}]*\}|\\[xu](?:\{[^}]*\}|[0-9a-fA-F]+)|\[:[^]]*:\]")
_MEMBERS = "".join(map(chr, [*range(0x80, 0xD800, 4), *range(0xE000, 0x20000, 8)]))


class Refused(ValueError):
    """The file cannot be used; the message says why and goes after the file's name."""


# -- loading, in both processes


def load_fast(data: bytes, declared: object, names: Iterable[str]) -> FastTokenizer:
    """Loads a tokenizer.json. declared: the added_tokens_decoder of tokenizer_config.json. names:
    tokens that are special if the tokenizer has them.

    The library raises Exception for a malformed file, and panics at the first use of an
    inconsistent one.
    """
    from tokenizers import AddedToken, Tokenizer  # each process needs one of the libraries

    fast = Tokenizer.from_buffer(data)
    fast.no_truncation()
    fast.no_padding()
    known = {item.content for item in fast.get_added_tokens_decoder().values()}
    items = declared.items() if isinstance(declared, dict) else ()
    for index, item in sorted((int(index), item) for index, item in items):
        token = item["content"]
        ours = fast.token_to_id(token) or fast.get_vocab_size()
        if token in known or ours != index:  # the two files disagree
            continue
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        options = {flag: item[flag] for flag in flags if flag in item}
        fast.add_tokens([AddedToken(token, **options)])
        known.add(token)
    for name in names:
        if name and name not in known and fast.token_to_id(name) is not None:
            fast.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    fast.encode("a", add_special_tokens=True)
    return fast


def load_sentencepiece(data: bytes) -> tuple[SentencePieceProcessor, SentencePieceProcessor]:
    """Loads a tokenizer.model: for the start of a text, and for the rest of it."""
    from sentencepiece import SentencePieceProcessor

    return (
        SentencePieceProcessor(model_proto=data),
        SentencePieceProcessor(model_proto=data + NO_DUMMY_PREFIX),
    )


# -- what the file says


def read_description(data: bytes) -> dict[str, Any]:
    """Parses a tokenizer.json. Refuses what the two parsers might read differently."""
    try:
        description = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError:
        raise Refused("is nested too deeply") from None
    if not isinstance(description, dict):
        raise Refused("must hold a JSON object")
    return description


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs) and len(pairs) <= MAX_STEPS:  # a vocabulary is larger
        raise Refused(f"has a key twice in one object: {min(made)!r} or another")
    return made


def check_description(description: dict[str, Any]) -> float:
    """Returns the most characters that the normalizer makes of one character of a text.

    Refuses steps that could make a text, its tokens or a decoded text too long.
    """
    growth, by_regex = _growth(_steps(description.get("normalizer")))
    splits = _steps(description.get("pre_tokenizer"))
    if sum(step.get("type") == "ByteLevel" for step in splits) > 1:
        raise Refused("has a pre-tokenizer that makes characters of bytes more than once")
    decoding, decoding_by_regex = _growth(_steps(description.get("decoder")))
    if growth > MAX_GROWTH or by_regex > MAX_REGEX_GROWTH:
        raise Refused("has a normalizer that can make a text too many times longer")
    if decoding > MAX_REGEX_GROWTH or decoding_by_regex > MAX_REGEX_GROWTH:
        raise Refused("has a decoder that can make a text too many times longer")
    _check_templates(_steps(description.get("post_processor")))
    _check_model(description["model"])
    return float(growth)


def _steps(component: object) -> list[dict[str, Any]]:
    """Returns the steps of a component, with those of sequences in their place, in any order."""
    steps: list[dict[str, Any]] = []
    waiting = [component]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        steps.append(step)
        for key in _INNER:
            inner = step.get(key)
            waiting.extend(inner if isinstance(inner, list) else ())
        if len(steps) + len(waiting) > MAX_STEPS:
            raise Refused(f"has a component of more than {MAX_STEPS} steps")
    return steps


def _growth(steps: list[dict[str, Any]]) -> tuple[float, float]:
    """Returns the most characters made of one: by all steps, and by regular expressions alone.

    A step counts by its keys, since the library also reads one without a type. Forms of Unicode
    count once, as they do not change what one of them has made.
    """
    forms = total = by_regex = 1.0
    for step in steps:
        forms = max(forms, _FORMS.get(str(step.get("type")), 1.0))
        total *= _EVERY_TIME.get(str(step.get("type")), 1.0)
        if isinstance(step.get("prepend"), str):
            total *= 1.0 + _inserted(step["prepend"])
        if isinstance(step.get("precompiled_charsmap"), str):
            total *= max(1, _longest_of_charsmap(base64.b64decode(step["precompiled_charsmap"])))
        if isinstance(step.get("content"), str) and isinstance(step.get("pattern"), dict):
            content = _inserted(step["content"])
            pattern = step["pattern"].get("String")
            if isinstance(pattern, str) and pattern:
                total *= max(1.0, content / len(pattern))
            else:  # it may match nothing, beside each character
                by_regex *= 1.0 + content
    return forms * total * by_regex, by_regex


def _inserted(text: str) -> int:
    """Returns the number of characters of an inserted text after later steps."""
    size = max(len(text), len(unicodedata.normalize("NFKD", text.lower())))
    if size > MAX_CONTENT_CHARS:
        raise Refused(f"has a step that inserts {size} characters at one place")
    return size


def _longest_of_charsmap(charsmap: bytes) -> int:
    """Returns the most characters that sentencepiece's table of replacements makes of one.

    The table begins with the size of its trie; behind the trie are texts that end at null bytes.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].decode("utf-8", "replace")
    expanded = unicodedata.normalize("NFKD", texts)
    return _inserted(max(expanded.split("\0"), key=len))


def _check_templates(steps: list[dict[str, Any]]) -> None:
    """Refuses templates that repeat the text or add many tokens to it."""
    for step in steps:
        for template in (step.get("single"), step.get("pair")):
            pieces = template if isinstance(template, list) else []
            texts = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
            special = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
            if len(set(texts)) < len(texts):
                raise Refused("has a post-processor that repeats the text")
            if sum(len(step["special_tokens"][name]["ids"]) for name in special) > MAX_SPECIAL_IDS:
                raise Refused(f"has a post-processor that adds more than {MAX_SPECIAL_IDS} tokens")


def _check_model(model: dict[str, Any]) -> None:
    ids = model.get("vocab")
    if isinstance(ids, dict) and len(set(map(repr, ids.values()))) < len(ids):
        # the library picks one of them arbitrarily
        raise Refused("has two tokens with the same id in its vocabulary")
    word = model.get("max_input_chars_per_word")
    if isinstance(word, int | float) and word > MAX_WORD_CHARS:  # a word takes its square
        raise Refused(f"has a max_input_chars_per_word above {MAX_WORD_CHARS}")
    for key in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if len(model.get(key) or "") > MAX_CONTENT_CHARS:
            raise Refused(f"has a {key} of more than {MAX_CONTENT_CHARS} characters")


def _regexes(description: dict[str, Any]) -> Iterator[str]:
    for key in ("normalizer", "pre_tokenizer", "decoder"):
        for step in _steps(description.get(key)):
            pattern = step.get("pattern")
            if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
                yield pattern["Regex"]


# -- trials


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


def is_panic(error: BaseException) -> bool:
    """Returns whether it is a panic of the library, whose class is not exported."""
    return type(error).__name__ == "PanicException"


# -- in the child process


def prepare(setup: dict[str, Any]) -> dict[str, Any]:
    """Imports the library before the limits apply. Makes the system end this process with the
    server's thread that started it."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    importlib.import_module(setup["library"])
    return setup


def start(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the function from {"file", "sha256", "declared", "names"} to {"error"} or to
    {"growth", "squares", "decoder"}: see check_description and try_texts. With a file in the setup
    it returns that of `make_encoder`."""
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
    """Returns the function from {"text", "kind"} to {"ids"} (uint32, base64) or to {"error"}.

    file: has "file", "sha256", "declared" and "names". kind: "special" adds the tokens around a
    text, "bare" does not, and "plain" has no special tokens in it either. For sentencepiece it is
    "first" or "rest".
    """
    data = _read(file)
    if file["library"] == "sentencepiece":
        first, rest = load_sentencepiece(data)

        def encode(text: str, kind: str) -> list[int]:
            ids: list[int] = (first if kind == "first" else rest).encode(text)
            return ids
    else:
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
    if question["file"].endswith(".model"):
        return _check_sentencepiece(data)
    description = read_description(data)
    growth = check_description(description)
    fast = load_fast(data, question["declared"], question["names"])
    tokens = fast.get_vocab(with_added_tokens=True)
    check_tokens(tokens)
    regexes = list(_regexes(description))
    end = "".join(dict.fromkeys("".join(map(_literals, regexes))))
    squares = try_texts(fast.encode, tokens, _chars_of(regexes), end)
    return {"growth": growth, "squares": squares, "decoder": description.get("decoder")}


def _check_sentencepiece(data: bytes) -> dict[str, Any]:
    normalizers = [spec for number, spec in _fields(data) if number == _NORMALIZER_SPEC]
    charsmaps = [
        charsmap
        for spec in normalizers
        for number, charsmap in _fields(spec)
        if number == _PRECOMPILED_CHARSMAP and charsmap
    ]
    growth = float(max(map(_longest_of_charsmap, charsmaps), default=1))
    first, rest = load_sentencepiece(data)
    tokens = [str(first.id_to_piece(index)) for index in range(first.vocab_size())]
    check_tokens(tokens)
    try_texts(rest.encode, tokens)
    return {"growth": growth, "squares": try_texts(first.encode, tokens)}


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields number and content of the fields of a protobuf message that hold bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == _VARINT:
            _, at = _varint(message, at)
        elif key & 7 == _BYTES:
            size, at = _varint(message, at)
            yield key >> 3, message[at : at + size]
            at += size
        elif key & 7 in _FIXED:
            at += _FIXED[key & 7]
        else:
            raise Refused("is not a sentencepiece model")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns a number and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
