"""A GGUF model as a checkpoint with the names and the shapes of its family.

What llama.cpp's conversion did to a tensor is undone as it is read: the rows of q and k are put
into their own order, the ones that were added to norms are subtracted, and each expert is a tensor.
Quantized tensors stay as they are, but for the embedding, whose rows are looked up.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ops.cpu.finite import all_finite
from quant.formats.gguf.formats import check_blocks, dequantized
from quant.formats.gguf.kinds import BY_NAME, row_bytes
from serve.errors import ModelLoadError
from serve.machine import available_memory
from serve.models.checkpoint import FLOATS, Checkpoint, Cut, TensorEntry
from serve.models.families import FAMILIES
from serve.models.gguf.architectures import find_architecture
from serve.models.gguf.keys import Keys
from serve.models.gguf.names import Source, tensor_sources
from serve.models.gguf.reader import read_gguf
from serve.models.mapped_file import Place
from serve.models.parts import head_rows

_TABLES = ("token_embd.weight", "per_layer_token_embd.weight")
_TABLE_TYPE = "F16"


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF file, or of all files of a split model."""

    described_by = "the keys of the file"
    is_strict = True

    def __init__(self, path: Path, model_type: str) -> None:
        """path: the file with the keys. model_type: the family whose names are used."""
        file = read_gguf(path)
        self._start(path)
        self._keys = Keys(file)
        self._head = f"{FAMILIES[model_type].names.heads[0]}.weight"
        architecture = find_architecture(self._keys)
        self._sources = tensor_sources(self._keys, architecture, model_type)
        self._places: dict[str, TensorEntry] = {}
        for name, source in self._sources.items():
            stored = file.entries.get(source.stored)
            if stored is None:
                continue
            entry = self._places[name] = self._entry(TensorEntry(*stored), source)
            if self._is_table(name):
                entry = entry._replace(dtype=_TABLE_TYPE)
            if source.values:
                entry = self._expansion_entry(entry, source)
            if source.is_transposed and entry.dtype in FLOATS:
                entry = entry._replace(shape=entry.shape[::-1])
            self.entries[name] = entry
        prefix = FAMILIES[model_type].names.prefixes[0]
        constants = architecture.constants(self._keys)
        self._constants = {prefix + name: constant for name, constant in constants.items()}
        for name, constant in self._constants.items():
            self.entries[name] = TensorEntry(path, constant.shape, "F32")
        num_bytes = sum(entry.end - entry.start for entry in file.entries.values())
        self._stays_cached = 2 * num_bytes <= available_memory()

    def stored_name(self, name: str) -> str:
        source = self._sources.get(name)
        return name if source is None else source.stored

    def fetch(self, name: str, index: int | None = None, cut: Cut | None = None) -> Tensor:
        if (constant := self._constants.get(name)) is not None:
            return torch.full(constant.shape, constant.value)
        if self._is_table(name):
            return self._table_rows(name, cut)
        source = self._sources[name]
        if source.values:
            return self._expansion(name, cut)
        stored = self._read(name, index)
        if source.is_transposed and self.entries[name].dtype in FLOATS:
            stored = stored.t()
        if source.heads:
            # a cut takes some rows
            order = head_rows(source.heads, 0, self._keys.head_dim, self._keys.head_dim)
            taken = stored[order if cut is None else cut(order)]
        else:
            taken = stored if cut is None else cut(stored)
        if not all_finite(taken):
            raise self._not_finite(name)
        return taken.float() - source.offset if source.offset else taken

    def _entry(self, stored: TensorEntry, source: Source) -> TensorEntry:
        """Returns the place of a tensor, which may be one expert or some rows."""
        if source.is_row and len(stored.shape) == 1:
            return stored._replace(shape=(1, *stored.shape))
        if source.expert is not None:
            stored = self._expert_entry(stored, source)
        if source.rows is None or not stored.shape:
            return stored
        first, end, _ = source.rows.indices(stored.shape[0])
        size = (stored.end - stored.start) // stored.shape[0]
        start, shape = stored.start + first * size, (end - first, *stored.shape[1:])
        return stored._replace(shape=shape, start=start, end=stored.start + end * size)

    def _expert_entry(self, stored: TensorEntry, source: Source) -> TensorEntry:
        assert source.expert is not None, "a part of stacked experts"
        count, *shape = stored.shape or (0,)
        if count != self._keys.num_experts or not shape:
            raise ModelLoadError(
                f"{stored.file}: tensor {source.stored} has shape {list(stored.shape)}, but "
                f"{self._keys.architecture}.expert_count is {self._keys.num_experts}"
            )
        size = (stored.end - stored.start) // count
        start = stored.start + source.expert * size
        return stored._replace(shape=tuple(shape), start=start, end=start + size)

    def _is_table(self, name: str) -> bool:
        """Returns whether a tensor is a quantized embedding, which is unpacked."""
        if self._sources[name].stored not in _TABLES or name == self._head:
            return False
        return self._places[name].dtype not in FLOATS

    def _place(self, name: str) -> Place:
        return _place_of(self._places[name])

    def _table_rows(self, name: str, cut: Cut | None) -> Tensor:
        entry, stored = self._places[name], self._read(name)
        try:
            check_blocks(entry.dtype, self._sources[name].stored, stored)
            found = dequantized(entry.dtype, stored, torch.float16)
        except ValueError as error:
            raise ModelLoadError(f"{entry.file}: {error}") from error
        if not all_finite(found):  # beyond fp16
            raise self._not_finite(name)
        return found if cut is None else cut(found)

    def _expansion_entry(self, keys: TensorEntry, source: Source) -> TensorEntry:
        """Returns the place of a latent's expansion, [heads * (keys + values), rank], of which the
        keys are stored as [heads, rank, keys] and the values as [heads, values, rank]."""
        values = self._keys.tensors.get(source.values)
        if values is None:
            raise ModelLoadError(f"{self.path}: tensor {source.values} is missing")
        of_keys, of_values = keys.shape, values.shape
        is_right = len(of_keys) == len(of_values) == 3 and of_keys[0] == of_values[0]
        if not is_right or of_keys[1] != of_values[2]:
            raise ModelLoadError(
                f"{self.path}: tensors {source.stored} and {source.values} have shapes "
                f"{list(of_keys)} and {list(of_values)}, which are not of one latent"
            )
        rows = of_keys[0] * (of_keys[2] + of_values[1])
        return keys._replace(shape=(rows, of_keys[1]), dtype="F32")

    def _expansion(self, name: str, cut: Cut | None) -> Tensor:
        source = self._sources[name]
        keys = self._floats(TensorEntry(*self._keys.tensors[source.stored]), source.stored)
        values = self._floats(TensorEntry(*self._keys.tensors[source.values]), source.values)
        whole = torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
        if not all_finite(whole):
            raise self._not_finite(name)
        return whole if cut is None else cut(whole)

    def _floats(self, entry: TensorEntry, name: str) -> Tensor:
        """Reads a stored tensor of any kind in fp32."""
        stored = self._read_place(entry.file, _place_of(entry))
        if entry.dtype in FLOATS:
            return stored.float()
        try:
            check_blocks(entry.dtype, name, stored)
            return dequantized(entry.dtype, stored, torch.float32)
        except ValueError as error:
            raise ModelLoadError(f"{entry.file}: {error}") from error


def _place_of(entry: TensorEntry) -> Place:
    """Returns the bytes of a tensor; a quantized one has rows of uint8."""
    _, shape, dtype, start, end = entry
    kind = BY_NAME[dtype]
    if kind.weights == 1:
        return Place(shape, dtype, start, end)
    return Place((*shape[:-1], row_bytes(kind, shape[-1])), "U8", start, end)
