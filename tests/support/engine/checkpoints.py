"""Small random Hugging Face checkpoints of every family, made with Transformers itself.

`make_checkpoint` writes one; `checkpoint` keeps them in build/test-checkpoints. Weights are drawn
so that greedy decoding visits many tokens: large products beside small embeddings, random
norms and biases. Transformers is imported only when a checkpoint is made or a reference is
loaded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]

Json = dict[str, Any]

BOS, EOS = "<s>", "</s>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog while the server merges every step",
    "a page is mapped when it is needed and given back when nobody needs it any more",
    "pack my box with five dozen liquor jugs; how vexingly quick daft zebras jump!",
    "def forward(self, input_ids, positions, attention): return self.norm(x)",
    "naïve café, größer, el niño, 1234567890, 日本語のテキスト, 한국어, 👍🏽 emoji",
)


@dataclass(frozen=True)
class Variant:
    """A checkpoint: settings over the family's base, and a change of the saved directory."""

    family: str
    name: str
    settings: Json = field(default_factory=dict)
    finish: Callable[[Path], None] | None = None
    max_shard_size: str = "1GB"

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


def edit_json(file: Path, change: Callable[[Json], object]) -> None:
    """Rewrites a JSON file after `change` has edited its object in place."""
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def _old_config(path: Path) -> None:
    """Rewrites config.json as Transformers 4 wrote it."""

    def change(values: Json) -> None:
        rope = values.pop("rope_parameters")
        values["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        values["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        values["torch_dtype"] = values.pop("dtype")
        values.pop("layer_types", None)

    edit_json(path / "config.json", change)


def _without_prefix(path: Path) -> None:
    """Removes the prefix of tensor names, as in a checkpoint saved without the head (gpt2)."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_WINDOW = {"use_sliding_window": True, "sliding_window": 8}
_MIXED = ["full_attention", "sliding_attention"]

VARIANTS: list[Variant] = [
    Variant("llama", "base"),
    Variant("llama", "mha", {"num_key_value_heads": 4}),
    Variant("llama", "mqa", {"num_key_value_heads": 1}),
    Variant("llama", "gqa4", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    Variant("llama", "tied", {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    Variant("llama", "bias", {"attention_bias": True, "mlp_bias": True}),
    Variant("llama", "head-dim", {"hidden_size": 48, "head_dim": 20}),
    Variant("llama", "odd-vocab", {"vocab_size": 307, "intermediate_size": 75}),
    Variant("llama", "llama3", {"rope_parameters": _LLAMA3}),
    Variant("llama", "linear", {"rope_parameters": _LINEAR}),
    Variant("llama", "yarn", {"rope_parameters": _YARN}),
    Variant("llama", "dynamic", {"rope_parameters": _DYNAMIC}),
    Variant("llama", "old-config", {"rope_parameters": _LLAMA3}, finish=_old_config),
    Variant("llama", "sharded", {"num_hidden_layers": 3}, max_shard_size="60KB"),
    Variant("qwen2", "base"),
    Variant("qwen2", "mha-tied", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    Variant("qwen2", "window", _WINDOW | {"layer_types": _MIXED}),
    Variant(
        "qwen2",
        "old-window",
        _WINDOW | {"max_window_layers": 1, "num_hidden_layers": 3},
        finish=_old_config,
    ),
    Variant("qwen3", "base"),
    Variant("qwen3", "tied", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    Variant("qwen3", "bias-window", _WINDOW | {"attention_bias": True, "layer_types": _MIXED}),
    Variant("mistral", "base"),
    Variant("mistral", "no-window", {"sliding_window": None, "num_key_value_heads": 1}),
    Variant("mistral", "head-dim", {"hidden_size": 48, "head_dim": 24, "sliding_window": 16}),
    Variant("opt", "base"),
    Variant("opt", "350m", {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    Variant("opt", "no-bias", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    Variant("opt", "untied", {"tie_word_embeddings": False, "activation_function": "gelu"}),
    Variant("gpt2", "base"),
    Variant("gpt2", "scaled", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80}),
    Variant("gpt2", "untied", {"tie_word_embeddings": False, "vocab_size": 307}),
    Variant("gpt2", "no-prefix", {}, finish=_without_prefix),
]

# Sequences span many windows, so that pages behind them are released. Not in VARIANTS, as
# references of that length are slow.
_LONG: Json = {"max_position_embeddings": 640, "sliding_window": 24}
LONG_VARIANTS = [
    Variant(
        "qwen2",
        "long-mixed",
        _LONG
        | {
            "use_sliding_window": True,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", *_MIXED, "sliding_attention"],
        },
    ),
    Variant("mistral", "long", _LONG),
]

_COMMON: Json = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_LLAMA: Json = _COMMON | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_BASES: dict[str, Json] = {
    "llama": _LLAMA | {"rms_norm_eps": 1e-5},
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"hidden_size": 48, "head_dim": 16},
    "mistral": _LLAMA | {"sliding_window": 8},
    "opt": _COMMON
    | {
        "hidden_size": 48,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    },
    "gpt2": _COMMON | {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256},
}


def find_variant(family: str, name: str) -> Variant:
    return next(
        item for item in [*VARIANTS, *LONG_VARIANTS] if (item.family, item.name) == (family, name)
    )


def make_checkpoint(directory: Path, family: str, variant: str = "base", seed: int = 0) -> Path:
    """Writes the checkpoint into directory / "family-variant-seed" and returns that path."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    chosen = find_variant(family, variant)
    path = directory / f"{chosen}-{seed}"
    config = AutoConfig.for_model(family, **(_BASES[family] | chosen.settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model, seed)
    model.save_pretrained(path, max_shard_size=chosen.max_shard_size)
    # a few ids of the model's vocabulary have no token, as in many real checkpoints
    write_tokenizer(path, num_tokens=config.vocab_size - 5)
    if chosen.finish is not None:
        chosen.finish(path)
    return path


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Draws norm weights around 1 and all others around 0. Embeddings are small, so that the
    blocks and not the last token decide the next one even where input and output tables are
    tied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                is_weight = name.endswith("weight")
                parameter.copy_(1.0 + 0.3 * noise if is_weight else 0.1 * noise)
            elif "positions" in name or "wpe" in name:
                parameter.copy_(noise)
            elif "embed" in name or "wte" in name:
                parameter.copy_(0.25 * noise)
            else:
                # ungated activations have a mean, which would outweigh what depends on the token
                gain = 0.5 if "fc2" in name or "mlp.c_proj" in name else 1.6
                parameter.copy_(noise * gain * min(parameter.shape) ** -0.5)


@functools.cache
def _tokenizer_json(num_tokens: int) -> str:
    """Returns a byte-level BPE tokenizer with BOS in front, trained on CORPUS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer.to_str()


def write_tokenizer(path: Path, num_tokens: int = 315) -> None:
    """Writes tokenizer.json and tokenizer_config.json with a chat template; BOS is 0, EOS is 1."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(_tokenizer_json(num_tokens), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": {"__type": "AddedToken", "content": EOS, "special": True},
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


@functools.cache
def _directory() -> Path:
    """Returns the cache directory, named by this file's content and Transformers' version."""
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    name = f"transformers-{importlib.metadata.version('transformers')}-{source}"
    return ROOT / "build" / "test-checkpoints" / name


@functools.cache
def checkpoint(family: str, variant: str = "base", seed: int = 0) -> Path:
    """Returns the checkpoint, made once on this machine. It is read-only: copy it to change it."""
    path = _directory() / f"{find_variant(family, variant)}-{seed}"
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as folder:
            made = make_checkpoint(Path(folder), family, variant, seed)
            with contextlib.suppress(OSError):  # another process has just made it
                made.rename(path)
    return path


@functools.cache
def reference_model(path: Path) -> Any:
    """Returns Transformers' own model of a checkpoint, fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def reference_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    """Returns the logits of one sequence, [T, vocab]."""
    with torch.no_grad():
        logits: torch.Tensor = reference_model(path)(torch.tensor([token_ids])).logits[0]
    return logits


def reference_greedy(path: Path, token_ids: list[int], num_tokens: int) -> list[int]:
    """Returns num_tokens of greedy decoding; end-of-sequence tokens do not stop it."""
    ids = list(token_ids)
    for _ in range(num_tokens):
        ids.append(int(reference_logits(path, ids)[-1].argmax()))
    return ids[len(token_ids) :]
