"""Checked reading of a GGUF model's keys and small tensors; every error names the file and the key.

Keys of an architecture begin with its name, as in llama.block_count; here they go without it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from serve.checkpoint_json import ConfigReader
from serve.errors import ModelLoadError, reason
from serve.models.families.fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from serve.models.families.mixture_fields import MAX_EXPERTS
from serve.models.gguf.reader import GGUFFile, GGUFTensor
from serve.regular_file import open_regular

_MAX_SINGLE = 3.4e38
MAX_FACTORS = MAX_HEADS  # of a rotary embedding

# Keys that say nothing about what a model computes on text.
_UNUSED = {
    "vocab_size",
    "context_length",
    "tensor_data_layout",
    "rope.dimension_sections",
    "rope.scaling.finetuned",
    "n_deepstack_layers",
    "pooling_type",
}
_OTHER_MODALITIES = ("vision.", "audio.", "mm.")


class Keys(ConfigReader):
    """The keys of a model's architecture, and what follows from them and from the tensors."""

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file.metadata, str(file.path))
        self._used: set[str] = set(_UNUSED)
        self.file = file
        self.architecture = ""
        self.architecture = self.text("general.architecture")
        start = f"{self.architecture}."
        self.values = {
            key.removeprefix(start): value
            for key, value in file.metadata.items()
            if key.startswith(start)
        }

    @property
    def tensors(self) -> Mapping[str, GGUFTensor]:
        return self.file.entries

    def fail(self, key: str, complaint: str) -> ModelLoadError:
        named = key if key.startswith("general.") else f"{self.architecture}.{key}"
        return super().fail(named, complaint)

    def check_all_used(self) -> None:
        """Raises ModelLoadError for a key that has not been read: it could change what the model
        computes."""
        for key in sorted(self.values.keys() - self._used):
            if not key.startswith(_OTHER_MODALITIES):
                raise self.fail(key, "is not known for this architecture")

    def has(self, key: str) -> bool:
        self._used.add(key)
        return super().has(key)

    def _get(self, key: str, default: object) -> Any:
        self._used.add(key)
        return super()._get(key, default)

    def number(
        self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e12
    ) -> float:
        return _shortest(super().number(key, default, low=low, high=high))

    def per_layer(self, key: str, default: int | None = None, *, high: int) -> int:
        """Returns a number that may be given for each layer, and must then be the same for all."""
        value = self.values.get(key)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise self.fail(key, "differs between layers, which is not supported")
            return ConfigReader({key: value[0]}, self._named(key)).integer(key, high=high)
        return self.integer(key, default, high=high)

    def of_layers(self, key: str, types: Sequence[str], kind: str) -> int:
        """Returns the number that a key has for all layers of a kind. types: each layer's."""
        value = self.values.get(key)
        if not isinstance(value, list):
            return self.integer(key, high=MAX_HEADS)
        if len(value) < len(types):
            raise self.fail(key, f"must list {len(types)} numbers")
        found = [item for item, each in zip(value, types, strict=False) if each == kind]
        if any(item != found[0] for item in found):
            raise self.fail(key, f"differs between layers with {kind}, which is not supported")
        return ConfigReader({key: found[0]}, self._named(key)).integer(key, high=MAX_HEADS)

    def shared_numbers(self, key: str) -> list[float]:
        """Returns the numbers of all layers of a key that has no architecture in its name, which
        may be one for all."""
        given = self.file.metadata.get(key)
        values = given if isinstance(given, list) else [given] * self.num_layers
        if len(values) != self.num_layers:
            raise ModelLoadError(f"{self.source}: {key} must list {self.num_layers} numbers")
        reader = ConfigReader({}, self.source)
        found = []
        for value in values:
            reader.values = {key: value}
            found.append(reader.number(key, low=-_MAX_SINGLE, high=_MAX_SINGLE))
        return found

    def _named(self, key: str) -> str:
        self._used.add(key)
        return f"{self.source}: {self.architecture}"

    def expect(self, key: str, value: object) -> None:
        """Raises ModelLoadError if the key is there with another value."""
        if self.has(key) and self.values[key] != value:
            raise self.fail(key, f"is {self.values[key]!r:.80}; only {value!r} is supported")

    # -- sizes

    @property
    def num_layers(self) -> int:
        """The layers without those that only predict further tokens."""
        more = self.integer("nextn_predict_layers", 0, low=0, high=MAX_LAYERS)
        count = self.num_blocks
        if more >= count:
            raise self.fail("nextn_predict_layers", f"is {more}, of {count} layers")
        return count - more

    @property
    def num_blocks(self) -> int:
        return self.integer("block_count", high=MAX_LAYERS)

    @property
    def hidden_size(self) -> int:
        return self.integer("embedding_length", high=MAX_WIDTH)

    @property
    def num_heads(self) -> int:
        return self.per_layer("attention.head_count", high=MAX_HEADS)

    @property
    def num_kv_heads(self) -> int:
        return self.per_layer("attention.head_count_kv", self.num_heads, high=MAX_HEADS)

    @property
    def head_dim(self) -> int:
        hidden, heads = self.hidden_size, self.num_heads
        if not self.has("attention.key_length") and hidden % heads:
            raise self.fail("attention.head_count", f"is {heads}; it does not divide {hidden}")
        size = self.integer("attention.key_length", max(1, hidden // heads), high=MAX_HEADS)
        self.expect("attention.value_length", size)
        return size

    @property
    def num_experts(self) -> int:
        """The experts of a layer, 0 if the model has none."""
        return self.integer("expert_count", 0, low=0, high=MAX_EXPERTS)

    @property
    def vocab_size(self) -> int:
        """The rows of the embedding. ModelLoadError if the keys say another number."""
        table = self.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise ModelLoadError(f"{self.source}: tensor token_embd.weight is missing")
        rows, tokens = table.shape[0], self.file.metadata.get("tokenizer.ggml.tokens")
        told: object = self.values.get("vocab_size")
        key = f"{self.architecture}.vocab_size"
        if told is None and isinstance(tokens, list):
            told, key = len(tokens), "tokenizer.ggml.tokens"
        if told is not None and told != rows:
            raise ModelLoadError(
                f"{self.source}: {key} says {told!r:.40} tokens, but tensor token_embd.weight has "
                f"{rows} rows"
            )
        return rows

    # -- tensors

    def has_tensor(self, stem: str) -> bool:
        """Returns whether any layer has a tensor, as in "attn_q.bias"."""
        return any(f"blk.{layer}.{stem}" in self.tensors for layer in range(self.num_layers))

    def rows(self, stem: str) -> int:
        """Returns the outputs of a product of the first layer that has it."""
        for layer in range(self.num_layers):
            found = self.tensors.get(f"blk.{layer}.{stem}")
            if found is not None and len(found.shape) >= 2:
                return found.shape[-2]
        raise ModelLoadError(f"{self.source}: tensor blk.0.{stem} is missing")

    def factors(self, name: str, *, high: float = 1e9) -> list[float] | None:
        """Reads a tensor of positive fp32 numbers below `high`; None if there is none."""
        entry = self.tensors.get(name)
        if entry is None:
            return None
        at = f"{self.source}: tensor {name}"
        if entry.dtype != "F32" or len(entry.shape) != 1 or entry.shape[0] > MAX_FACTORS:
            raise ModelLoadError(f"{at} must list at most {MAX_FACTORS} numbers of type F32")
        num_bytes = 4 * entry.shape[0]
        try:
            with open_regular(entry.file) as file:
                file.seek(entry.start)
                data = file.read(num_bytes)
        except OSError as error:
            raise ModelLoadError(f"{at} cannot be read: {reason(error)}") from error
        if len(data) != num_bytes:
            raise ModelLoadError(f"{at} is cut off")
        values = list(struct.unpack(f"<{entry.shape[0]}f", data))
        if not all(0 < value < high for value in values):
            raise ModelLoadError(f"{at} holds a factor that is not a positive number")
        return values


def _shortest(value: float) -> float:
    """Returns the number with the fewest digits of which a number of 32 bits was made."""
    single = struct.pack("<f", min(value, _MAX_SINGLE))
    for digits in range(1, 9):
        found = float(f"{value:.{digits}g}")
        if found <= _MAX_SINGLE and struct.pack("<f", found) == single:
            return found
    return value
