"""Random checkpoints of real shapes, for measurements whose text need not make sense.

They are written once into the cache folder, as safetensors in bf16 or in the format in which the
model is published, with a synthetic byte-level tokenizer of the full vocabulary, so that every part
of the server does its usual work.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import shutil
import string
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from bench.common.checkpoint_shapes import SHAPES, config_of
from bench.common.random_weights import random_tensors
from bench.common.safetensors_writer import INDEX, SINGLE, write_checkpoint
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.errors import ConfigError
from serve.hub.find import find
from serve.single_file.config import directory_of
from serve.units import format_memory

RANDOM = "random:"
_LARGE = 1 << 30  # a checkpoint whose writing is told
_LEFT_FREE = 256 << 20  # of the disk


def cache_folder() -> Path:
    """Returns $XDG_CACHE_HOME/mergestep, by default ~/.cache/mergestep."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "mergestep"


def model_directory(model: str | Path | None, *, revision: str | None = None) -> str | None:
    """Returns the model's directory, which for a GGUF file describes that, or None for the embedded
    model. "random:SHAPE" is a random checkpoint, which the first call writes, and "ORG/NAME" a
    model of the hub, which the first call fetches. revision: of a name on the hub. Raises
    ConfigError for an unknown shape or a revision of anything else, and ModelLoadError."""
    if revision is None and (model is None or model == DEFAULT_MODEL):
        return None
    if revision is not None or not str(model).startswith(RANDOM):
        location = find(str(model or DEFAULT_MODEL), revision=revision, tell=_tell)
        return str(directory_of(Path(location.model)))
    shape = str(model).removeprefix(RANDOM)
    if shape not in SHAPES:
        shapes = ", ".join(RANDOM + name for name in SHAPES)
        near = difflib.get_close_matches(shape, SHAPES, n=1)
        hint = f"; did you mean {RANDOM}{near[0]}?" if near else ""
        raise ConfigError(
            f"model {str(model)!r} is unknown; models with random weights are {shapes}{hint}"
        )
    return str(random_checkpoint(shape))


def _tell(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def random_checkpoint(
    shape: str,
    config: dict[str, Any] | None = None,
    *,
    folder: Path | None = None,
    has_weights: bool = True,
) -> Path:
    """Returns the checkpoint's directory. The first call makes it from a fixed seed.

    shape: one of SHAPES, or with the config.json of another one any name for it. A checkpoint
    without weights is for the setting load_format=random. ConfigError if the disk has no room for
    the weights; a checkpoint that was not written to its end leaves nothing behind.
    """
    path = (folder or cache_folder()) / f"random-{shape}"
    needed = [SINGLE, INDEX] if has_weights else ["tokenizer_config.json"]
    if any((path / name).is_file() for name in needed):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        write_random(made, config or config_of(shape), shape, has_weights=has_weights)
        made.chmod(0o755)
        if not any((path / name).is_file() for name in needed):  # another call may have written it
            _replace(made, path)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return path


def write_random(path: Path, config: dict[str, Any], title: str, *, has_weights: bool) -> None:
    """Writes a checkpoint with random weights of any configuration into an empty directory.

    title: for the user. ConfigError if the disk has no room for the weights.
    """
    (path / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(path, config["vocab_size"])
    if not has_weights:
        return
    tensors = random_tensors(path)
    total = sum(tensor.size_bytes for tensor in tensors)
    free = shutil.disk_usage(path).free
    if total + _LEFT_FREE > free:
        raise ConfigError(
            f"{RANDOM}{title} takes {format_memory(total)} of disk, and {format_memory(free)} are"
            f" free below {path.parent}; make room, or set XDG_CACHE_HOME to another disk"
        )
    console = Console(stderr=True)
    if total >= _LARGE:
        text = f"writing {RANDOM}{title} once: {format_memory(total)} below {path.parent}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    is_hidden = not console.is_terminal
    bar = Progress(
        *columns, TransferSpeedColumn(), console=console, transient=True, disable=is_hidden
    )
    with bar:
        task = bar.add_task(f"random {title} checkpoint", total=total)
        write_checkpoint(path, tensors, advance=lambda num_bytes: bar.advance(task, num_bytes))


def _replace(made: Path, path: Path) -> None:
    """Renames a directory; one without weights, of another call, gives way to it."""
    if path.is_dir():
        shutil.rmtree(path)
    made.rename(path)


def with_context(folder: Path, max_model_len: int) -> Path:
    """Copies the embedded model into the folder, with a context that it was not trained for."""
    source, path = EngineConfig.from_settings(None).model_path, folder / "other-context"
    shutil.copytree(source, path)
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = max_model_len
    (path / "config.json").write_text(json.dumps(config))
    return path


def with_idle_layers(folder: Path, num_layers: int) -> Path:
    """Copies the embedded model into the folder, with so many layers more that add nothing.

    They are copies of the last layer whose output products are zero, so a step takes longer, and
    every hidden state after the last layer, and every answer, is that of the embedded model.
    """
    from safetensors.torch import load_file, save_file

    source, path = EngineConfig.from_settings(None).model_path, folder / "idle-layers"
    shutil.copytree(source, path, ignore=shutil.ignore_patterns(SINGLE))
    config = json.loads((source / "config.json").read_text())
    first = config["num_hidden_layers"]
    config["num_hidden_layers"] = first + num_layers
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / SINGLE)
    last = f"model.layers.{first - 1}."
    copied = {name.removeprefix(last): t for name, t in tensors.items() if name.startswith(last)}
    for number in range(first, first + num_layers):
        for name, tensor in copied.items():
            is_output = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            value = tensor.new_zeros(tensor.shape) if is_output else tensor.clone()
            tensors[f"model.layers.{number}.{name}"] = value
    save_file(tensors, path / SINGLE, metadata={"format": "pt"})
    return path


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """Writes a tokenizer of the bytes, then aa, ab, ... aaa, ..., each with a merge."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<s>": 0, "</s>": 1}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    merges: list[tuple[str, str]] = []
    words = (
        "".join(letters)
        for size in itertools.count(2)
        for letters in itertools.product(string.ascii_lowercase, repeat=size)
    )
    for word in itertools.islice(words, vocab_size - len(vocab)):
        merges.append((word[:-1], word[-1]))
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
