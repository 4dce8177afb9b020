"""GGUF files that are wrong are named with what is wrong, and take no more memory than is said."""

from __future__ import annotations

import os
import struct
import tracemalloc

import pytest

from serve.errors import ModelLoadError
from serve.models.gguf import reader
from serve.models.gguf.reader import read_gguf
from tests.support.gguf.raw_file import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Info,
    array,
    gguf_bytes,
    scalar,
    text,
)

ONE: list[Info] = [("a", (64, 2), 0, 0)]
TWICE = [("a", scalar(U8, 1)), ("a", scalar(U8, 1))]
HUGE = 2**63


def nested() -> bytes:
    return struct.pack("<IIQ", ARRAY, ARRAY, 1) + array(U8, [1])[4:]


WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has 0 bytes and ends within its first four bytes: it is cut off"),
    "magic": (gguf_bytes(magic=b"ggml"), "it begins with b'ggml' instead of b'GGUF'"),
    "safetensors": (struct.pack("<Q", 99) + b"{" * 99, "it begins with"),
    "version 1": (gguf_bytes(version=1), "it has version 1; versions 2 and 3 are read"),
    "version 4": (gguf_bytes(version=4), "it has version 4"),
    "version 0": (gguf_bytes(version=0), "it has version 0"),
    "big-endian": (gguf_bytes(version=3 << 24), "its numbers are big-endian"),
    "many keys": (gguf_bytes(num_keys=HUGE), "at most 16,384 are read"),
    "more keys than bytes": (gguf_bytes(num_keys=999), "too few for its 999 keys"),
    "many tensors": (gguf_bytes(num_tensors=HUGE), "at most 131,072 are read"),
    "more tensors than bytes": (gguf_bytes(num_tensors=99), "too few for its 99 tensors"),
    "key twice": (gguf_bytes(TWICE), "key a is there twice"),
    "long key": (gguf_bytes([("a" * 65_536, scalar(U8, 1))]), "65,536 bytes; 65,535 are the most"),
    "type of value": (
        gguf_bytes([("a", struct.pack("<IQ", 13, 0))]),
        "key a has a value of unknown type 13",
    ),
    "type of values": (
        gguf_bytes([("a", struct.pack("<IIQ", ARRAY, 77, 0))]),
        "key a has values of unknown type 77",
    ),
    "nested": (gguf_bytes([("a", nested())]), "key a is an array of arrays"),
    "bool": (
        gguf_bytes([("a", struct.pack("<IB", BOOL, 2))]),
        "key a holds a bool that is neither 0 nor 1",
    ),
    "bools": (
        gguf_bytes([("a", struct.pack("<IIQ", ARRAY, BOOL, 2) + b"\1\3")]),
        "key a holds a bool that is neither",
    ),
    "not UTF-8": (
        gguf_bytes([("a", struct.pack("<I", STRING) + text(b"\xff"))]),
        "key a is not UTF-8",
    ),
    "not UTF-8 in an array": (gguf_bytes([("a", array(STRING, [b"\xc3"]))]), "key a is not UTF-8"),
    "surrogates": (gguf_bytes([("a", array(STRING, [b"\xed\xa0\x80"]))]), "key a is not UTF-8"),
    "long string": (
        gguf_bytes([("a", struct.pack("<I", STRING) + text("b", HUGE))]),
        "key a has 9,223,372,036,854,775,808 bytes",
    ),
    "cut string": (
        gguf_bytes([("a", struct.pack("<I", STRING) + text("b", 1000))]),
        "ends within key a: it is cut off",
    ),
    "long string in an array": (
        gguf_bytes([("a", array(STRING, ["b"])[:-9] + text("b", HUGE))]),
        "ends within key a: it is cut off",
    ),
    "long array": (
        gguf_bytes([("a", array(U8, [1], HUGE))]),
        "key a has 9,223,372,036,854,775,808",
    ),
    "cut array": (gguf_bytes([("a", array(U64, [1], 4000))]), "ends within key a: it is cut off"),
    "cut array of strings": (
        gguf_bytes([("a", array(STRING, ["b"], 4000))]),
        "too few for its 4,000 strings of key a",
    ),
    "long name": (gguf_bytes([], [("a" * 513, (1,), 0, 0)], data=4), "513 bytes; 512 are the most"),
    "dimensions": (gguf_bytes([], [("a", (1,) * 5, 0, 0)], data=4), "5 dimensions; 4 are the most"),
    "type": (
        gguf_bytes([], [("a", (1,), 4, 0)], data=4),
        "tensor a has a type of unknown number 4",
    ),
    "empty tensor": (gguf_bytes([], [("a", (4, 0), 0, 0)]), r"tensor a has the empty shape [0, 4]"),
    "part of a block": (
        gguf_bytes([], [("a", (48, 64), 8, 0)], data=4096),
        r"tensor a has shape [64, 48], but rows of Q8_0 are multiples of 32",
    ),
    "huge tensor": (
        gguf_bytes([], [("a", (HUGE, HUGE, HUGE, HUGE), 0, 0)], data=4),
        "it is cut off or wrong",
    ),
    "size that overflows": (
        gguf_bytes([], [("a", (2**32, 2**32), 0, 0)], data=4),
        "73,786,976,294,838,206,464 bytes",
    ),
    "far offset": (gguf_bytes([], [("a", (1,), 0, HUGE)], data=4), "it is cut off or wrong"),
    "offset": (gguf_bytes([], [("a", (1,), 0, 8)], data=64), "begins at 8, which is no multiple"),
    "tensor twice": (gguf_bytes([], ONE * 2, data=512), "tensor a is there twice"),
    "same place": (
        gguf_bytes([], [*ONE, ("b", (64, 2), 0, 0)], data=512),
        "tensors a and b overlap",
    ),
    "overlap": (
        gguf_bytes([], [("b", (64,), 0, 480), *ONE], data=736),
        "tensors a and b overlap",
    ),
    "cut off": (gguf_bytes([], ONE, data=511), "but its header describes"),
    "alignment 0": (gguf_bytes([("general.alignment", scalar(U32, 0))]), "general.alignment is 0"),
    "alignment 48": (gguf_bytes([("general.alignment", scalar(U32, 48))]), "alignment is 48;"),
    "alignment 4": (gguf_bytes([("general.alignment", scalar(U32, 4))]), "alignment is 4;"),
    "alignment 2^21": (gguf_bytes([("general.alignment", scalar(U32, 2**21))]), "is 2097152;"),
    "alignment in fp32": (gguf_bytes([("general.alignment", scalar(F32, 32.0))]), "is 32.0;"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, case):
    data, message = WRONG[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError) as raised:
        read_gguf(path)
    assert str(raised.value).startswith(f"{path} cannot be read as GGUF: ")
    assert message in str(raised.value)


def test_text_of_the_file_is_shortened_and_escaped(tmp_path):
    path = tmp_path / "m.gguf"
    name = "\x1b[31m" + "x" * 5000
    path.write_bytes(gguf_bytes([(name, scalar(U8, 1))] * 2))
    with pytest.raises(ModelLoadError) as raised:
        read_gguf(path)
    assert len(str(raised.value)) < 300 and "\x1b" not in str(raised.value)


def test_what_is_no_file_is_named(tmp_path):
    for path in (tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(ModelLoadError, match=f"{path} cannot be read"):
            read_gguf(path)
    os.mkfifo(tmp_path / "fifo.gguf")
    with pytest.raises(ModelLoadError, match="it is a FIFO"):
        read_gguf(tmp_path / "fifo.gguf")


def test_every_shorter_file_is_cut_off(tmp_path):
    path = tmp_path / "m.gguf"
    keys = [("a", scalar(STRING, "b")), ("c", array(STRING, ["d", "e"])), ("f", array(U16, [1, 2]))]
    whole = gguf_bytes(keys, [("g", (4, 2), 0, 0), ("h", (2,), 1, 32)], data=36)
    path.write_bytes(whole)
    assert read_gguf(path).metadata == {"a": "b", "c": ["d", "e"], "f": [1, 2]}
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"cut off|too few"):
            read_gguf(path)


# -- memory


def worst_files(bytes_left: int, items: int, tensors: int) -> dict[str, bytes]:
    """Returns files whose values take the most memory for their size."""
    strings = min(items, bytes_left // 10)
    wide = "a" * (bytes_left - 4) + "\U0001f44d"  # one letter makes all of them four bytes
    return {
        "bytes": gguf_bytes([("a", array(U8, [1] * items))]),
        "numbers": gguf_bytes([("a", array(U64, [2**64 - 1] * min(items, bytes_left // 8)))]),
        "strings": gguf_bytes([("a", array(STRING, [f"{n % 90 + 10}" for n in range(strings)]))]),
        "empty strings": gguf_bytes([("a", array(STRING, [""] * min(items, bytes_left // 8)))]),
        "long strings": gguf_bytes([("a", array(STRING, ["b" * (bytes_left // 8)] * 7))]),
        "wide string": gguf_bytes([("a", scalar(STRING, wide))]),
        "keys": gguf_bytes([(f"{n:04}", scalar(U64, 2**63)) for n in range(bytes_left // 24)]),
        "tensors": gguf_bytes([], [(f"{n}", (1,), 0, 32 * n) for n in range(tensors)]),
    }


def most_memory(header_bytes: int, items: int, tensors: int) -> int:
    """The bound that the limits set: the header and a copy of it as text of four bytes a letter, a
    value with its place in a list, and a tensor with its entry."""
    return 7 * header_bytes + 80 * items + 1000 * tensors


@pytest.mark.parametrize("case", worst_files(0, 0, 0))
def test_the_limits_bound_the_memory(tmp_path, monkeypatch, case):
    size, items, tensors = 1 << 18, 1 << 14, 1 << 11
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", size)
    monkeypatch.setattr(reader, "MAX_ITEMS", items)
    monkeypatch.setattr(reader, "MAX_TENSORS", tensors)
    for scale, is_read in ((0.75, True), (4, False)):
        path = tmp_path / f"{scale}.gguf"
        data = worst_files(*(int(scale * most) for most in (size, items, tensors)))[case]
        path.write_bytes(data + bytes(1 << 19))
        tracemalloc.start()
        try:
            if is_read:
                read_gguf(path)
            else:
                with pytest.raises(
                    ModelLoadError, match=r"longer than|may have|are read|are the most"
                ):
                    read_gguf(path)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= most_memory(size, items, tensors), f"{peak:,}"


def test_a_model_takes_less_than_a_gigabyte_while_it_is_read():
    limits = reader.MAX_HEADER_BYTES, reader.MAX_ITEMS, reader.MAX_TENSORS
    assert most_memory(*limits) < 1 << 30


def test_announced_sizes_reserve_nothing(tmp_path):
    path = tmp_path / "m.gguf"
    for case in ("many keys", "many tensors", "long string", "long array", "huge tensor"):
        path.write_bytes(WRONG[case][0])
        tracemalloc.start()
        try:
            with pytest.raises(ModelLoadError):
                read_gguf(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
