"""The models among GGUF files, by the files' names: quantizations, and files in several parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

SUFFIX = ".gguf"
DEFAULT_QUANT = "Q4_K_M"
_MAX_PARTS = 1000
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})", re.DOTALL)
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|T[QL]\d+(?:_\d+)*|MXFP\d+(?:_[A-Z0-9]+)*|NVFP4"
    r"|B?F16|F32|FP16|FP32))$",
    re.IGNORECASE,
)


class GgufModel(NamedTuple):
    """A model. quant: its quantization in capitals, or "" if no name tells it. paths: its files in
    order. size_bytes: of all of them. is_whole: no part is missing."""

    quant: str
    paths: tuple[str, ...]
    size_bytes: int
    is_whole: bool = True

    @property
    def stem(self) -> str:
        return stem_of(self.paths[0])


def stem_of(path: str) -> str:
    """Returns the path of a GGUF file without the ending and the number of the part."""
    stem = path.removesuffix(SUFFIX)
    part = _PART.fullmatch(stem)
    return part[1] if part else stem


def gguf_models(sizes: Mapping[str, int]) -> list[GgufModel]:
    """Returns the language models among files, which are given as sizes by path.

    Projectors of other modalities and importance matrices are none.
    """
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for path in sorted(sizes):
        name = path.rpartition("/")[2].lower()
        if not path.endswith(SUFFIX) or name.startswith("mmproj") or "imatrix" in name:
            continue
        stem = path.removesuffix(SUFFIX)
        part = _PART.fullmatch(stem)
        key = (part[1], int(part[3])) if part else (stem, 1)
        groups.setdefault(key, {})[int(part[2]) if part else 1] = path
    models = []
    for (stem, count), parts in groups.items():
        is_whole = count <= _MAX_PARTS and sorted(parts) == list(range(1, count + 1))
        paths = tuple(parts[number] for number in sorted(parts))
        size = sum(sizes[path] for path in paths)
        models.append(GgufModel(quant_of(stem), paths, size, is_whole))
    return models


def quant_of(stem: str) -> str:
    """Returns the quantization that a file's name or, failing that, its folder's ends with."""
    for text in (stem.rpartition("/")[2], stem.rpartition("/")[0]):
        found = _QUANT.search(text)
        if found:
            return found[1].upper()
    return ""


def matching(models: Iterable[GgufModel], choice: str) -> list[GgufModel]:
    """Returns the models that a file or a quantization names, in any case of letters.

    A file is given with or without its folder; one part stands for all. "Q4_K_XL" also stands for
    "UD-Q4_K_XL" where there is no other.
    """
    models = list(models)
    if choice.endswith(SUFFIX):
        return [
            model
            for model in models
            if any(path == choice or path.rpartition("/")[2] == choice for path in model.paths)
        ]
    wanted = choice.upper()
    exact = [model for model in models if model.quant == wanted]
    return exact or [model for model in models if model.quant == f"UD-{wanted}"]


def names(models: Iterable[GgufModel]) -> dict[str, GgufModel]:
    """Returns the models by what follows the colon in their names: the quantization, or the first
    file where that is unknown or not the only one."""
    models = list(models)
    counts: dict[str, int] = {}
    for model in models:
        counts[model.quant] = counts.get(model.quant, 0) + 1
    return {
        model.quant if model.quant and counts[model.quant] == 1 else model.paths[0]: model
        for model in models
    }
