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
from pathlib import Path
from typing import Any

import torch

from tests.support.engine.variants.table import (
    LONG_VARIANTS,
    VARIANTS,
    find_variant,
    settings_of,
)
from tests.support.engine.variants.variant import Json, Variant, edit_json

__all__ = [
    "LONG_VARIANTS",
    "VARIANTS",
    "Json",
    "Variant",
    "checkpoint",
    "edit_json",
    "find_variant",
    "make_checkpoint",
]

ROOT = Path(__file__).parents[3]
VARIANT_FILES = sorted((Path(__file__).parent / "variants").glob("*.py"))
# families that AutoModelForCausalLM does not know -> the class of their model
_CLASSES = {"kimi_k2": "DeepseekV3ForCausalLM", "mistral4": "Mistral4ForCausalLM"}

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


def make_checkpoint(directory: Path, family: str, variant: str = "base", seed: int = 0) -> Path:
    """Writes the checkpoint into directory / "family-variant-seed" and returns that path."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    chosen = find_variant(family, variant)
    path = directory / f"{chosen}-{seed}"
    model_class = class_of(family, settings_of(chosen))
    config = model_class.config_class(**settings_of(chosen))
    model = model_class(config).float()
    randomize(model, seed)
    model.save_pretrained(path, max_shard_size=chosen.max_shard_size)
    # a few ids of the model's vocabulary have no token, as in many real checkpoints
    write_tokenizer(path, num_tokens=config.vocab_size - 5)
    if chosen.finish is not None:
        chosen.finish(path)
    return path


def class_of(family: str, settings: Json) -> Any:
    """Returns Transformers' class of a family's model."""
    import transformers

    if family in _CLASSES:
        return getattr(transformers, _CLASSES[family])
    config = transformers.AutoConfig.for_model(family, **settings)
    return transformers.AutoModelForCausalLM._model_mapping[type(config)]


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draws norm weights around 1 and all others around 0. Embeddings are small, so that the
    blocks and not the last token decide the next one even where input and output tables are
    tied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "sinks" in name:
                parameter.copy_(noise)
            elif parameter.ndim == 1:
                is_weight = name.endswith("weight")
                parameter.copy_(1.0 + 0.3 * noise if is_weight else 0.1 * noise)
            elif "positions" in name or "wpe" in name:
                parameter.copy_(noise)
            elif "embed" in name or "wte" in name:
                parameter.copy_(0.25 * noise)
            else:
                # ungated activations have a mean, which would outweigh what depends on the token
                gain = 0.5 if "fc2" in name or "mlp.c_proj" in name else 1.6
                parameter.copy_(noise * gain * min(parameter.shape[-2:]) ** -0.5)
        for name, buffer in model.named_buffers():
            if "correction" in name:  # of the choice of experts
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            elif "layer_scalar" in name:
                buffer.fill_(0.8)


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
    """Returns the cache directory, named by these files' content and Transformers' version."""
    files = [Path(__file__), *VARIANT_FILES]
    source = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
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
    import transformers

    values = json.loads((path / "config.json").read_text())
    model_type = values["model_type"]
    # attention that is fused has no soft cap
    options = {"attn_implementation": "eager"} if model_type == "gemma2" else {}
    model_class = transformers.AutoModelForCausalLM
    if model_type in _CLASSES:
        model_class = getattr(transformers, _CLASSES[model_type])
        config_class = model_class.config_class
        options["config"] = config_class.from_dict(values | {"model_type": config_class.model_type})
    return model_class.from_pretrained(path, dtype=torch.float32, **options).eval()


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
