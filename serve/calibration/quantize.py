"""Writes a checkpoint with int4 weights that were rounded with the help of a text.

The format is pack-quantized of compressed-tensors with symmetric groups, which this server computes
exactly as it is stored, on any number of ranks, and which other servers read, too.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from quant.compensated import compensated_int4
from quant.int4 import Int4Weight
from serve.calibration.moments import Moments, layer_moments
from serve.checkpoint_json import read_json
from serve.errors import ConfigError, ModelLoadError, reason
from serve.models import ModelSpec, read_spec
from serve.models.checkpoint import INDEX, Checkpoint
from serve.models.checksums import MANIFEST
from serve.models.families import FAMILIES
from serve.regular_file import open_regular
from serve.text.tokenizer import Tokenizer

MIN_TOKENS = 2
_COPIED = (".json", ".jinja", ".txt", ".model")  # the tokenizer, the template, generation settings
_MAX_COPIED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was done: num_tokens of the text were read; the numbers of products in int4 and of
    those that stay as they are, because the groups do not divide their inputs."""

    num_tokens: int
    num_products: int
    num_plain: int
    size_bytes: int


def quantize_checkpoint(
    path: Path,
    output: Path,
    text: str,
    *,
    group: int,
    max_tokens: int,
    window: int,
    report: Callable[[str], object] = lambda line: None,
) -> Quantized:
    """Writes the checkpoint at path with int4 weights to the new folder output.

    The first max_tokens of the text are read in windows. ConfigError names a setting or a property
    of the model that does not allow it; ModelLoadError is that of a checkpoint. A folder that was
    begun is removed after an error.
    """
    spec, checkpoint = read_spec(path), Checkpoint(path)
    if renamed := FAMILIES[spec.model_type].names.renamed:
        checkpoint.rename(renamed)
    _check(spec, checkpoint, output)
    window = min(window, spec.max_model_len, *_chunks(spec))
    tokens = Tokenizer.load(path).encode(text)[:max_tokens]
    if len(tokens) < MIN_TOKENS:
        raise ConfigError("the text has fewer than two tokens")
    windows = [tokens[i : i + window] for i in range(0, len(tokens), window)]
    folder = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        writer = _Writer(checkpoint, folder, spec.num_layers + 1, group)
        prefix = _layer_prefix(spec, checkpoint)
        for number, moments in layer_moments(path, windows):
            report(f"layer {number + 1} of {spec.num_layers}")
            writer.write(prefix.format(number), moments)
        writer.write("", {})
        writer.finish(path)
        folder.chmod(0o755)
        folder.rename(output)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {reason(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # after an error; else it has another name
    return Quantized(len(tokens), writer.num_products, writer.num_plain, writer.size_bytes)


def _check(spec: ModelSpec, checkpoint: Checkpoint, output: Path) -> None:
    if spec.packed is not None:
        raise ConfigError(f"the checkpoint is already quantized ({spec.packed.method})")
    if FAMILIES[spec.model_type].names.is_transposed:
        raise ConfigError(f"{spec.model_type} stores weights transposed, as no format has them")
    if any(layer.shares is not None for layer in spec.attention_layers):
        raise ConfigError(f"layers of {spec.model_type} that share K/V cannot be read one by one")
    if output.exists():
        raise ConfigError(f"{output} exists already")
    if not output.parent.is_dir():
        raise ConfigError(f"{output.parent} is not a directory")
    need = sum(entry.end - entry.start for entry in checkpoint.entries.values())
    free = shutil.disk_usage(output.parent).free
    if need > free:
        raise ConfigError(f"{output.parent} has {free >> 20} MiB free, and may need {need >> 20}")


def _chunks(spec: ModelSpec) -> list[int]:
    """Returns the sizes of the chunks that layers attend within."""
    return [layer.chunk for layer in spec.attention_layers if layer.chunk is not None]


def _layer_prefix(spec: ModelSpec, checkpoint: Checkpoint) -> str:
    names = FAMILIES[spec.model_type].names
    return checkpoint.find_prefix(names.prefixes, f"{names.embed}.weight") + names.layer


class _Writer:
    """Writes the tensors of a checkpoint to files of a folder, those of a layer to one."""

    def __init__(self, checkpoint: Checkpoint, folder: Path, num_files: int, group: int) -> None:
        self.num_products = self.num_plain = self.size_bytes = 0
        self._checkpoint, self._folder = checkpoint, folder
        self._num_files, self._group = num_files, group
        self._left = set(checkpoint.entries)
        self._files: dict[str, str] = {}
        self._plain: list[str] = []

    def write(self, prefix: str, moments: Moments) -> None:
        """Writes the tensors that are left and whose names begin so."""
        tensors: dict[str, Tensor] = {}
        for name in sorted(self._left):
            if name.startswith(prefix):
                tensors |= self._converted(name, moments)
                self._left.remove(name)
        number = len(set(self._files.values())) + 1
        file = f"model-{number:05d}-of-{self._num_files:05d}.safetensors"
        save_file(tensors, self._folder / file, metadata={"format": "pt"})
        self._checkpoint.release()
        self._files |= dict.fromkeys(tensors, file)
        self.size_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def _converted(self, name: str, moments: Moments) -> dict[str, Tensor]:
        stored, module = self._checkpoint.fetch(name), name.removesuffix(".weight")
        own = self._checkpoint.stored_name(name)
        if module == name or stored.ndim != 2:
            return {own: stored.contiguous()}
        if module not in moments or stored.shape[1] % self._group:
            self.num_plain += module in moments
            self._plain.append(own.removesuffix(".weight"))
            return {own: stored.contiguous()}
        self.num_products += 1
        try:
            weight = compensated_int4(stored, moments[module], self._group)
        except ValueError as error:
            raise ModelLoadError(f"{module}: {error}") from error
        return packed_tensors(own.removesuffix(".weight"), weight)

    def finish(self, path: Path) -> None:
        """Writes the index, config.json and copies of the other files."""
        sizes = {"metadata": {"total_size": self.size_bytes}, "weight_map": self._files}
        _write_json(self._folder / INDEX, sizes)
        config = read_json(path / "config.json")
        config["quantization_config"] = quantization_config(self._group, self._plain)
        _write_json(self._folder / "config.json", config)
        for file in sorted(path.iterdir()):
            is_written = (self._folder / file.name).exists()
            if file.suffix in _COPIED and not is_written and file.name != MANIFEST:
                _copy(file, self._folder / file.name)


def _copy(file: Path, to: Path) -> None:
    with open_regular(file) as source, to.open("wb") as target:
        if file.stat().st_size > _MAX_COPIED_BYTES:
            raise ModelLoadError(f"{file} is larger than {_MAX_COPIED_BYTES >> 20} MiB")
        shutil.copyfileobj(source, target)


def packed_tensors(module: str, weight: Int4Weight) -> dict[str, Tensor]:
    """Returns what pack-quantized stores of a weight: eight codes to a word, the first lowest."""
    num_out, num_in = weight.codes.shape
    shifts = torch.arange(0, 32, 4)
    words = (weight.codes.reshape(num_out, -1, 8).long() << shifts).sum(2)
    halves = weight.scales.half()
    is_exact = torch.equal(halves.float(), weight.scales)
    return {
        f"{module}.weight_packed": words.to(torch.int32),
        f"{module}.weight_scale": halves if is_exact else weight.scales,
        f"{module}.weight_shape": torch.tensor([num_out, num_in]),
    }


def quantization_config(group: int, plain: list[str]) -> dict[str, Any]:
    """Returns what config.json says about the format. plain: modules that are not quantized."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": group,
        "symmetric": True,
        "dynamic": False,
        "actorder": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": sorted({"lm_head", *plain}),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
