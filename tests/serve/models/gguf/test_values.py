"""Whatever stands in a key or a tensor's description: a model is described, or refused."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve.errors import ModelLoadError
from serve.models import read_spec
from serve.models.gguf.config import config_values, sampling_values
from serve.models.gguf.reader import GGUFFile, read_gguf
from tests.support.gguf.cases import find_case, original
from tests.support.gguf.writer import write_gguf

NAMES = [
    *("llama-llama3", "phi3-short", "gemma3_text-linear", "glm4_moe-groups", "deepseek_v3-yarn"),
    *("gemma4_text-shared", "apertus-llama3"),
]
ODD: list[Any] = [
    *(0, 1, -1, 3, 1 << 31, (1 << 64) - 1, True, False),
    *(0.0, -1.5, 1e-30, 1e308, math.nan, math.inf),
    *("", "text", "\0", [], [0], [1, 2], ["a"], [True, False], [math.nan]),
]


@pytest.fixture(scope="module", params=NAMES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    case = find_case(request.param)
    folder = tmp_path_factory.mktemp("gguf")
    return read_gguf(write_gguf(original(case), folder / "model.gguf", case.family))


def describe(file: GGUFFile, folder: Path) -> None:
    """Describes a file as the cache does, and reads that; it may be refused."""
    with contextlib.suppress(ModelLoadError):
        values = json.dumps(config_values(file) | sampling_values(file), allow_nan=False)
        (folder / "config.json").write_text(values)
        read_spec(folder)


def test_any_value_of_a_key(file: GGUFFile, tmp_path: Path) -> None:
    for key in file.metadata:
        for value in ODD:
            describe(replace(file, metadata=file.metadata | {key: value}), tmp_path)


def test_any_missing_key(file: GGUFFile, tmp_path: Path) -> None:
    for key in file.metadata:
        rest = {name: value for name, value in file.metadata.items() if name != key}
        describe(replace(file, metadata=rest), tmp_path)


def changed_entries(file: GGUFFile, name: str) -> Iterator[dict[str, Any]]:
    entry = file.entries[name]
    rest = {key: value for key, value in file.entries.items() if key != name}
    yield rest
    yield rest | {name + "x": entry}
    for shape in ((), (1,), (3, 5), (1 << 40,), (2, 3, 4, 5)):
        yield rest | {name: entry._replace(shape=shape)}
    for dtype in ("Q4_K", "I32", "TQ1_0"):
        yield rest | {name: entry._replace(dtype=dtype)}


def test_any_shape_and_type_of_a_tensor(file: GGUFFile, tmp_path: Path) -> None:
    for name in file.entries:
        for entries in changed_entries(file, name):
            describe(replace(file, entries=entries), tmp_path)


def test_first_files_of_glm_4_7_flash_do_not_say_how_experts_are_scored(tmp_path: Path) -> None:
    case = find_case("deepseek_v3-yarn")
    whole = read_gguf(write_gguf(original(case), tmp_path / "model.gguf", case.family))

    def with_rows(rows: int) -> GGUFFile:
        table = whole.entries["token_embd.weight"]
        entries = whole.entries | {"token_embd.weight": table._replace(shape=(rows, 64))}
        keys = whole.metadata | {"deepseek2.block_count": 47, "deepseek2.vocab_size": rows}
        del keys["deepseek2.expert_gating_func"]
        return replace(whole, metadata=keys, entries=entries)

    assert config_values(with_rows(154_880))["model_type"] == "deepseek_v3"
    with pytest.raises(ModelLoadError, match="expert_weights_norm is True"):
        config_values(with_rows(154_881))
