"""Headers of GGUF files that the package `gguf` writes, also of split models."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from serve.errors import ModelLoadError
from serve.models.gguf.reader import GGUFFile, read_gguf
from tests.support.gguf.raw_file import BOOL, STRING, U8, U16, U32, Key, gguf_bytes, scalar

VALUES: dict[str, tuple[str, Any]] = {
    "uint8": ("u8", 200),
    "int8": ("i8", -100),
    "uint16": ("u16", 60_000),
    "int16": ("i16", -30_000),
    "uint32": ("u32", 4_000_000_000),
    "int32": ("i32", -2_000_000_000),
    "float32": ("f32", 0.15625),
    "uint64": ("u64", 2**64 - 1),
    "int64": ("i64", -(2**63)),
    "float64": ("f64", 1e300),
    "bool": ("flag", True),
    "string": ("text", "so ge\u00e4ndert \U0001f44d\n\0"),
}
ARRAYS: dict[str, list[Any]] = {
    "numbers": [1, -2, 3],
    "floats": [0.5, -1.25],
    "flags": [True, False, True],
    "texts": ["a", "", "\u00e4\U0001f44d"],
}


def write(path: Path, *, alignment: int | None = None, **options: Any) -> Path:
    """Writes all types of values, and tensors of several types."""
    writer = GGUFWriter(path, "llama", **options)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for kind, (key, value) in VALUES.items():
        getattr(writer, f"add_{kind}")(key, value)
    for key, values in ARRAYS.items():
        writer.add_array(key, values)
    generator = np.random.default_rng(0)
    for number in range(3):
        weight = generator.standard_normal((6, 64), dtype=np.float32)
        for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_1"):
            quantized = gguf.quants.quantize(weight, GGMLQuantizationType[kind])
            writer.add_tensor(f"{kind}.{number}", quantized, raw_dtype=GGMLQuantizationType[kind])
    writer.add_tensor("vector", generator.standard_normal(5, dtype=np.float32))
    writer.add_tensor("experts", generator.standard_normal((3, 4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check_tensors(found: GGUFFile, files: list[Path]) -> None:
    """Compares names, shapes, types and bytes with what the package reads."""
    known = {}
    for file in files:
        for tensor in GGUFReader(file).tensors:
            known[tensor.name] = file, tensor
    assert found.entries.keys() == known.keys()
    for name, (file, tensor) in known.items():
        entry = found.entries[name]
        assert entry.file == file and entry.dtype == tensor.tensor_type.name
        assert entry.shape == tuple(tensor.shape.tolist())[::-1]
        data = file.read_bytes()[entry.start : entry.end]
        assert data == tensor.data.tobytes() and len(data) == tensor.n_bytes


@pytest.mark.parametrize("alignment", [None, 8, 32, 64, 4096])
def test_values_and_tensors_of_the_package(tmp_path, alignment):
    path = write(tmp_path / "m.gguf", alignment=alignment)
    found = read_gguf(path)
    expected = dict(VALUES.values()) | ARRAYS
    expected |= {"general.architecture": "llama"}
    if alignment is not None:
        expected |= {"general.alignment": alignment}
    assert found.metadata == expected and found.path == path and found.files == (path,)
    types = {key: type(value) for key, value in found.metadata.items()}
    assert types == {key: type(value) for key, value in expected.items()}
    fields = GGUFReader(path).fields
    assert all(fields[key].contents() == value for key, value in found.metadata.items())
    check_tensors(found, [path])


def test_version_2(tmp_path):
    path = write(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    assert data[4:8] == struct.pack("<I", 3)
    data[4] = 2
    path.write_bytes(data)
    assert found_keys(path) == {"general.architecture", *(k for k, _ in VALUES.values()), *ARRAYS}
    check_tensors(read_gguf(path), [path])


def found_keys(path: Path) -> set[str]:
    return set(read_gguf(path).metadata)


def test_a_tensor_of_no_dimension_and_a_file_without_tensors(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([], [("a", (), 0, 0)], data=4))
    assert read_gguf(path).entries["a"].shape == ()
    path.write_bytes(gguf_bytes([("a", scalar(U8, 1))]))
    assert read_gguf(path).metadata == {"a": 1} and read_gguf(path).entries == {}


# -- split models


def split(folder: Path, name: str = "m") -> list[Path]:
    write(folder / f"{name}.gguf", split_max_tensors=7)
    return sorted(folder.glob(f"{name}-*.gguf"))


def test_a_split_model_is_read_from_its_first_file(tmp_path):
    files = split(tmp_path)
    assert [file.name for file in files] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    found = read_gguf(files[0])
    assert found.files == tuple(files) and found.metadata["text"] == VALUES["string"][1]
    assert len(found.entries) == 17
    check_tensors(found, files)


def test_a_split_model_whose_first_file_has_no_tensors(tmp_path):
    write(tmp_path / "m.gguf", split_max_tensors=9, small_first_shard=True)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) == 3
    check_tensors(read_gguf(files[0]), files)


def test_another_file_of_a_split_model_names_the_first(tmp_path):
    files = split(tmp_path)
    with pytest.raises(ModelLoadError, match=r"not the first file.*; m-00001-of-00003.gguf is"):
        read_gguf(files[1])


def test_missing_renamed_and_foreign_files_of_a_split_model(tmp_path):
    files = split(tmp_path)
    data = [file.read_bytes() for file in files]
    files[1].unlink()
    with pytest.raises(ModelLoadError, match=r"has 3 files, but m-00002-of-00003.gguf is missing"):
        read_gguf(files[0])
    files[1].write_bytes(data[2])
    with pytest.raises(ModelLoadError, match=r"split.no and split.count must be 1 and 3.*not 2"):
        read_gguf(files[0])
    files[1].write_bytes(data[1])
    other = tmp_path / "other.gguf"
    other.write_bytes(data[0])
    with pytest.raises(ModelLoadError, match=r"one of 3 files.*end in -00001-of-00003.gguf"):
        read_gguf(other)


def splits(folder: Path, *, tensors: tuple[str, str], count: Any, total: Any) -> Path:
    for number, name in enumerate(tensors):
        keys: list[Key] = [
            ("split.no", scalar(U16, number)),
            ("split.count", scalar(*count)),
            ("split.tensors.count", scalar(*total)),
        ]
        file = folder / f"m-{number + 1:05}-of-{len(tensors):05}.gguf"
        file.write_bytes(gguf_bytes(keys, [(name, (4,), 0, 0)], data=16))
    return folder / "m-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"tensors": ("a", "a")}, r"tensor a is also in m-00001-of-00002.gguf"),
        ({"total": (U32, 3)}, r"split.tensors.count is 3, but its files have 2"),
        ({"count": (U32, 3)}, r"names must end in -00001-of-00003"),
        ({"count": (U32, 2**20)}, r"split.count is 1048576; models of at most 1024 files"),
        ({"count": (STRING, "2")}, r"split.count is 2; models of at most"),
        ({"count": (BOOL, True)}, r"split.count is True"),
    ],
)
def test_counts_of_split_models(tmp_path, changed, message):
    path = splits(
        tmp_path, **{"tensors": ("a", "b"), "count": (U16, 2), "total": (U32, 2)} | changed
    )
    if message is None:
        assert list(read_gguf(path).entries) == ["a", "b"]
    else:
        with pytest.raises(ModelLoadError, match=message):
            read_gguf(path)
