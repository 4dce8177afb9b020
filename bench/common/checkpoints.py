"""Random checkpoints of real shapes, for measurements whose text need not make sense.

They are written once into the cache folder, as bf16 safetensors with a synthetic byte-level
tokenizer of the full vocabulary, so that every part of the server does its usual work.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import shutil
import string
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file

from serve.config import DEFAULT_MODEL, EngineConfig
from serve.errors import ConfigError

RANDOM = "random:"

SHAPES: dict[str, dict[str, Any]] = {
    # Llama-3.2-1B
    "llama-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    # Llama-3.1-8B
    "llama-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
    },
    # A prompt of 32k tokens takes about fifteen seconds on two cores.
    "small-32k": {
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    # Little to compute, and 64 KiB of K/V per token in fp32.
    "wide-kv": {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 512,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    # A step takes a few milliseconds: for smoke tests of the scripts.
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
    # For interpreted kernels.
    "one-layer": {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": 320,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
}


def cache_folder() -> Path:
    """Returns $XDG_CACHE_HOME/mergestep, by default ~/.cache/mergestep."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "mergestep"


def model_directory(model: str | Path | None) -> str | None:
    """Returns the model's directory, or None for the embedded model. "random:SHAPE" is a random
    checkpoint, which the first call writes. Raises ConfigError for an unknown shape."""
    if model is None or model == DEFAULT_MODEL:
        return None
    if not str(model).startswith(RANDOM):
        return str(model)
    shape = str(model).removeprefix(RANDOM)
    if shape not in SHAPES:
        shapes = ", ".join(RANDOM + name for name in SHAPES)
        near = difflib.get_close_matches(shape, SHAPES, n=1)
        hint = f"; did you mean {RANDOM}{near[0]}?" if near else ""
        raise ConfigError(
            f"model {str(model)!r} is unknown; models with random weights are {shapes}{hint}"
        )
    return str(random_checkpoint(shape))


def random_checkpoint(shape: str, *, folder: Path | None = None, has_weights: bool = True) -> Path:
    """Returns the checkpoint's directory. The first call makes it from a fixed seed.

    A checkpoint without weights is for the setting load_format=random.
    """
    path = (folder or cache_folder()) / f"random-{shape}"
    needed = path / ("model.safetensors" if has_weights else "tokenizer_config.json")
    if needed.is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape] | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(path, config["vocab_size"])
    if not has_weights:
        return path
    part = path / "model.safetensors.part"
    save_file(_tensors(config, shape), part, metadata={"format": "pt"})
    part.rename(path / "model.safetensors")
    return path


def with_context(folder: Path, max_model_len: int) -> Path:
    """Copies the embedded model into the folder, with a context that it was not trained for."""
    source, path = EngineConfig.from_settings(None).model_path, folder / "other-context"
    shutil.copytree(source, path)
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = max_model_len
    (path / "config.json").write_text(json.dumps(config))
    return path


def _tensors(config: dict[str, Any], title: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.empty(rows, columns).normal_(0, columns**-0.5, generator=generator)
        return values.bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    layers = range(config["num_hidden_layers"])
    console = Console(stderr=True)
    is_hidden = not console.is_terminal
    title = f"random {title} checkpoint"
    for i in track(layers, title, console=console, transient=True, disable=is_hidden):
        prefix = f"model.layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", ffn, hidden),
            ("mlp.up_proj", ffn, hidden),
            ("mlp.down_proj", hidden, ffn),
        ):
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return tensors


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
