"""The target for GGUF files: headers, tables of tensors, and the blocks of the tensors.

An input is a description in JSON of a file, which mutations change field by field, or a file. What
is read lies within the file and unpacks to finite numbers; what is a model, too, is opened as one.
"""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import tempfile
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ops import get_backend
from quant.formats.gguf.blocks import LAYOUTS
from quant.formats.gguf.formats import GGUF
from quant.formats.gguf.kinds import KINDS
from serve.errors import ModelLoadError
from serve.models import load_model
from serve.models.gguf.config import config_values
from serve.models.gguf.pointer import write_pointer
from serve.models.gguf.reader import GGUFFile, GGUFTensor, read_gguf
from tests.support.engine.decoders import run as run_model
from tests.support.gguf.raw_file import ARRAY, LETTERS, STRING, gguf_bytes, text

BACKEND = get_backend("cpu")
MAX_DATA = 1 << 14
MAX_UNPACKED = 1 << 12  # weights of a tensor
MAX_FILE = 1 << 20  # mutations multiply
MAX_GROWTH = 64 << 20  # of the process's peak of memory by reading such a file
BLOCKS = random.Random(0).randbytes(MAX_DATA)
SMALL = bytes(byte & 0x3F for byte in BLOCKS)  # without NaN and infinity in any type
F32, Q8_0 = 0, 8  # numbers of types
# what becomes of an input: the header is refused, it is read but is no whole model, or it is one
REFUSED, READ, MODEL, NO_FILE = "refused", "read, no model", "a model", "no file"
# in memory where it can be: a disk takes longer to write a file than all else takes
MEMORY = Path("/dev/shm")
FOLDER = tempfile.TemporaryDirectory(
    prefix="fuzz-gguf-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None
)


def _seeds() -> tuple[bytes, ...]:
    keys: list[Any] = [
        ["general.architecture", [STRING, "llama"]],
        ["general.alignment", [4, 64]],
        ["llama.block_count", [4, 2]],
        ["llama.rope.freq_base", [6, 10000.0]],
        ["tokenizer.ggml.add_bos_token", [7, 1]],
        ["tokenizer.ggml.tokens", [ARRAY, STRING, ["a", "\u00e4", ""]]],
        ["tokenizer.ggml.scores", [ARRAY, 6, [0.0, -1.5]]],
        ["tokenizer.ggml.token_type", [ARRAY, 5, [1, 1, 3]]],
        ["split.count", [2, 1]],
    ]
    described = []
    numbers = [number for number, kind in KINDS.items() if kind.name in (*LAYOUTS, "F32", "BF16")]
    for some in (numbers[:5], numbers[5:10], numbers[10:]):
        tensors, at = [], 0
        for number in some:
            tensors.append([f"blk.{number}.weight", [256, 2], number, at])
            size = 512 // KINDS[number].weights * KINDS[number].num_bytes
            at += -(-size // 64) * 64
        described.append({"version": 3, "keys": keys, "tensors": tensors, "data": at})
    described += [_dense(), _mixture()]
    found = [run(json.dumps(one).encode()) for one in described]
    assert found == [READ] * 3 + [MODEL] * 2  # a seed is a right file
    return (*(json.dumps(one).encode() for one in described), file_of(described[0])[:1500])


def _dense() -> dict[str, Any]:
    shapes = {f"attn_{part}": [32, rows] for part, rows in (("q", 32), ("k", 16), ("v", 16))}
    shapes |= {stem: [32, 32] for stem in ("attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    return _model("llama", {}, shapes)


def _mixture() -> dict[str, Any]:
    """Describes a model with q, k and v in one tensor, and gate and up of its experts in one."""
    shapes = {"attn_qkv": [32, 64], "attn_output": [32, 32], "ffn_gate_inp": [32, 2]}
    shapes |= {"ffn_gate_up_exps": [32, 64, 2], "ffn_down_exps": [32, 32, 2]}
    shapes |= {"attn_q_norm": [16], "attn_k_norm": [16]}
    return _model("qwen3moe", {"expert_count": 2, "expert_used_count": 1}, shapes)


def _model(arch: str, more: dict[str, int], shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Describes a model of one layer. shapes: those of its tensors, with a row's size first."""
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32}
    sizes |= {"feed_forward_length": 32, "attention.head_count": 2, "attention.head_count_kv": 1}
    sizes |= {"rope.dimension_count": 16, "vocab_size": 3} | more
    keys: list[Any] = [
        ["general.architecture", [STRING, arch]],
        ["general.alignment", [4, 64]],
        *([f"{arch}.{key}", [4, value]] for key, value in sizes.items()),
        [f"{arch}.attention.layer_norm_rms_epsilon", [6, 1e-5]],
        ["tokenizer.ggml.tokens", [ARRAY, STRING, ["a", "b", "c"]]],
    ]
    whole = {"token_embd": [32, 3], "output_norm": [32]}
    layer = {"attn_norm": [32], "ffn_norm": [32]} | shapes
    whole |= {f"blk.0.{stem}": shape for stem, shape in layer.items()}
    tensors, at = [], 0
    for name, shape in whole.items():
        kind = F32 if len(shape) == 1 or "gate_inp" in name else Q8_0
        tensors.append([f"{name}.weight", shape, kind, at])
        size = prod(shape) // KINDS[kind].weights * KINDS[kind].num_bytes
        at += -(-size // 64) * 64
    return {"version": 3, "keys": keys, "tensors": tensors, "data": at, "is_model": True}


def _number(letter: str, value: Any) -> bytes:
    """Returns any number in a type, without its higher bits."""
    if letter in "fd":
        return struct.pack(f"<{letter}", value)
    size = struct.calcsize(letter)
    return (int(value) % (1 << 8 * size)).to_bytes(size, "little")


def _value(kind: int, value: Any) -> bytes:
    if kind != STRING:
        return _number(LETTERS.get(kind, "Q"), value)
    if isinstance(value, list):  # with a length that may be wrong
        return text(str(value[0]), int(value[1]) % (1 << 64))
    return text(str(value).encode("utf-8", "replace"))


def _typed(described: list[Any]) -> bytes:
    kind = int(described[0]) % (1 << 32)
    head = struct.pack("<I", kind)
    if kind != ARRAY:
        return head + _value(kind, described[1])
    inner, values = int(described[1]) % (1 << 32), described[2]
    count = described[3] if len(described) > 3 else len(values)
    written = b"".join(_value(inner, value) for value in values)
    return head + _number("I", inner) + _number("Q", count) + written


def file_of(described: dict[str, Any]) -> bytes:
    """Returns the file that is described, with its numbers as they are."""
    tensors = []
    for name, dimensions, kind, offset in described["tensors"]:
        sizes = [int(size) % (1 << 64) for size in dimensions]
        tensors.append((str(name), sizes, int(kind) % (1 << 32), int(offset) % (1 << 64)))
    header = gguf_bytes(
        [(str(key), _typed(value)) for key, value in described["keys"]],
        tensors,
        version=int(described["version"]) % (1 << 32),
        num_keys=_count(described, "num_keys"),
        num_tensors=_count(described, "num_tensors"),
        alignment=64,
    )
    blocks = SMALL if described.get("is_model") else BLOCKS
    return header + blocks[: int(described["data"]) % (MAX_DATA + 1)]


def _count(described: dict[str, Any], key: str) -> int | None:
    return None if key not in described else int(described[key]) % (1 << 64)


def _written(data: bytes) -> Path:
    path = Path(FOLDER.name) / "m.gguf"
    path.write_bytes(data)
    return path


def run(data: bytes) -> str:
    """Returns what became of an input. Raises what a hostile file raises but ModelLoadError, and
    AssertionError for a result that is no part of the file."""
    try:
        data = file_of(json.loads(data))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        pass  # it is a file itself, or no description
    except (OverflowError, RecursionError, struct.error):
        return NO_FILE
    if len(data) > MAX_FILE:
        return NO_FILE
    path, before = _written(data), _peak_bytes()
    try:
        found = read_gguf(path)
    except ModelLoadError as error:
        message = str(error)
    else:
        message = ""
    assert _peak_bytes() - before <= MAX_GROWTH
    if message:
        assert message.startswith(str(path)) and len(message) < 600
        return REFUSED
    _check(found, data)
    try:
        _load(found)
        message = ""
    except ModelLoadError as error:
        message = str(error)
    assert _peak_bytes() - before <= MAX_GROWTH
    assert not message or (FOLDER.name in message and len(message) < 2000)
    return READ if message else MODEL


def _load(found: GGUFFile) -> None:
    """Loads a model and computes with it. ModelLoadError if it is none."""
    values = config_values(found)
    folder = Path(FOLDER.name)
    (folder / "config.json").write_text(json.dumps(values, allow_nan=False))
    write_pointer(folder, (found.path,))
    model = load_model(folder, dtype=torch.float32, backend=BACKEND, unpack=True)
    logits = run_model(model, [0, 0])
    assert logits.shape == (2, values["vocab_size"])


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _check(found: GGUFFile, data: bytes) -> None:
    places = sorted((entry.start, entry.end) for entry in found.entries.values())
    assert all(0 < start < end <= len(data) for start, end in places)
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    for entry in found.entries.values():
        if entry.dtype in LAYOUTS and prod(entry.shape) <= MAX_UNPACKED:
            _unpack(entry, data[entry.start : entry.end])


def _unpack(entry: GGUFTensor, data: bytes) -> None:
    num_in = entry.shape[-1]
    num_out = prod(entry.shape[:-1])
    header = {"p.weight": entry._replace(shape=(num_out, num_in))}
    form = GGUF.of(header, "p", num_in, num_out)
    assert form is not None

    def fetch(name: str, index: int | None = None) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(num_out, -1)

    try:
        weight = form.load(fetch, ["p"])
    except ValueError as error:
        message = str(error)
    else:
        plain = weight.plain()
        assert plain.shape == (num_out, num_in) and bool(plain.isfinite().all())
        return
    assert "tensor p.weight holds" in message


SEEDS = _seeds()
