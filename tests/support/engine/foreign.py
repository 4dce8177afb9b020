"""Small random checkpoints of families that have no row in the table, made with Transformers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import tempfile
from pathlib import Path

import torch

from tests.support.engine.checkpoints import ROOT, Json, randomize, write_tokenizer
from tests.support.engine.variants.variant import LLAMA

HEADS: Json = {"head_dim": 16}
# family -> settings over those of a small Llama
FOREIGN: dict[str, Json] = {
    "helium": HEADS,
    "cohere": {"num_key_value_heads": 4, "use_qk_norm": True, "logit_scale": 0.5},
    "nemotron": {"partial_rotary_factor": 0.5},
    "olmo": {"clip_qkv": 3.0},
    "gemma": HEADS | {"tie_word_embeddings": True},
    "phi": {},
    "gpt_neox": {"use_parallel_residual": True},
    "vaultgemma": HEADS
    | {"sliding_window": 16, "query_pre_attn_scalar": 16, "layer_types": None}
    | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0},
    "granite_swa": HEADS | {"sliding_window": 16},
    "cwm": HEADS
    | {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "diffllama": HEADS,
    "minicpm3": {
        **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
    },
}


def make_foreign(directory: Path, family: str, seed: int = 0, **settings: object) -> Path:
    """Writes the checkpoint into directory / family and returns that path."""
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = transformers.AutoConfig.for_model(family, **(LLAMA | FOREIGN[family] | settings))
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    randomize(model, seed)
    path = directory / family
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


@functools.cache
def _directory() -> Path:
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    name = f"foreign-{importlib.metadata.version('transformers')}-{source}"
    return ROOT / "build" / "test-checkpoints" / name


@functools.cache
def foreign(family: str) -> Path:
    """Returns the checkpoint, made once on this machine. It is read-only: copy it to change it."""
    path = _directory() / family
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as folder:
            made = make_foreign(Path(folder), family)
            with contextlib.suppress(OSError):  # another process has just made it
                made.rename(path)
    return path


@functools.cache
def eager_model(path: Path) -> torch.nn.Module:
    """Returns Transformers' own model of a checkpoint in fp32, without fused attention."""
    import transformers

    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model


@functools.cache
def eager_greedy(path: Path, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Returns num_tokens of greedy decoding by Transformers."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(eager_model(path)(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
