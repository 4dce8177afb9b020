"""Small random models that are written as GGUF files, one or more of each architecture."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.support.engine.checkpoints import ROOT, class_of, randomize, write_tokenizer
from tests.support.engine.variants.mixtures import GROUPS
from tests.support.engine.variants.variant import LLAMA, LLAMA3, YARN, Json

FULL, SLIDING = "full_attention", "sliding_attention"
_EXPERTS: Json = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_LOCAL: Json = {"num_local_experts": 6, "num_experts_per_tok": 3}
_SCALES: Json = {
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.4,
    "embedding_multiplier": 5.0,
    "logits_scaling": 2.0,
}
_LONG: Json = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}
_LATENT: Json = GROUPS | {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "num_key_value_heads": 4,
}
_GEMMA: Json = {"sliding_window": 8, "head_dim": 32, "query_pre_attn_scalar": 32}
_GLM: Json = {
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layernorm_epsilon": 1e-5,
    "seq_length": 256,
    "rope_ratio": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
}
_GPT2: Json = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": 256,
}
_ERNIE: Json = {
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
}
_HUNYUAN: Json = {
    "num_experts": 6,
    "moe_topk": [3, 3],
    "moe_intermediate_size": [96, 96],
    "head_dim": 16,
    "num_shared_expert": [1, 1],
}
_LLAMA4: Json = {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 80,
}
_MISTRAL4: Json = _LATENT | {
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "rope_parameters": YARN
    | {"factor": 128.0, "original_max_position_embeddings": 16, "beta_fast": 32.0}
    | {"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.0},
}
_GEMMA4: Json = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING] * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
    "attention_k_eq_v": False,
}
_BIASES: Json = {"attention_bias": True, "mlp_bias": True}


class Case(NamedTuple):
    """A model: settings over those of a small Llama. is_everyday: it is part of `make test`."""

    family: str
    name: str
    settings: Json
    is_everyday: bool = False

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


CASES = [
    Case("llama", "llama3", {"rope_parameters": LLAMA3}, is_everyday=True),
    Case("llama", "yarn-biases", _BIASES | {"rope_parameters": YARN, "num_key_value_heads": 4}),
    Case(
        "llama",
        "linear-tied",
        {"tie_word_embeddings": True, "head_dim": 32}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    Case("mistral", "no-window", {"sliding_window": None, "head_dim": 32}),
    Case("mixtral", "base", _LOCAL),
    Case("qwen2", "tied", {"tie_word_embeddings": True}),
    Case("qwen3", "base", {"head_dim": 32}),
    Case(
        "qwen2_moe",
        "shared",
        _EXPERTS | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    ),
    Case("qwen3_moe", "base", _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}, True),
    Case("olmo2", "base", {}),
    Case(
        "olmo3",
        "yarn",
        {"num_hidden_layers": 5, "sliding_window": 8}
        | {
            "rope_parameters": {
                FULL: YARN,
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
    ),
    Case("olmoe", "base", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    Case(
        "gemma2",
        "caps",
        _GEMMA
        | {"num_hidden_layers": 3, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
        | {"tie_word_embeddings": True},
    ),
    Case(
        "gemma3_text",
        "linear",
        _GEMMA
        | {"num_hidden_layers": 7, "tie_word_embeddings": True}
        | {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 20000.0},
            }
        },
        is_everyday=True,
    ),
    Case("phi3", "window", {"sliding_window": 8, "original_max_position_embeddings": 256}),
    Case("phi3", "short", {"original_max_position_embeddings": 256, "rope_parameters": _LONG}),
    Case("granite", "multipliers", _SCALES),
    Case("granitemoe", "multipliers", _SCALES | _LOCAL),
    Case(
        "gpt_oss",
        "yarn",
        _LOCAL
        | {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 2}
        | {
            "rope_parameters": YARN
            | {"rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
            | {"truncate": False, "original_max_position_embeddings": 16}
        },
        is_everyday=True,
    ),
    Case("glm4", "base", {"head_dim": 32, "attention_bias": True}),
    Case("glm4_moe", "groups", GROUPS | {"head_dim": 32, "use_qk_norm": True}),
    Case("glm4_moe", "biases", GROUPS | {"head_dim": 32, "attention_bias": True}),
    Case(
        "dots1",
        "groups",
        GROUPS | {"norm_topk_prob": True, "sliding_window": None, "head_dim": 32},
    ),
    Case("deepseek_v2", "no-rank", _LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    Case(
        "deepseek_v3",
        "yarn",
        _LATENT
        | {"q_lora_rank": 32, "norm_topk_prob": True}
        | {
            "rope_parameters": YARN
            | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
            | {"original_max_position_embeddings": 16}
        },
    ),
    Case("minimax_m2", "partial", _LOCAL | {"head_dim": 32, "rotary_dim": 16}),
    Case(
        "ministral3",
        "yarn",
        {"head_dim": 32, "sliding_window": None}
        | {
            "rope_parameters": YARN
            | {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16}
            | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
        },
    ),
    Case(
        "hunyuan_v1_dense",
        "alpha",
        {"head_dim": 32, "tie_word_embeddings": True}
        | {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 1000.0,
                "factor": 1.0,
            }
        },
    ),
    Case("smollm3", "nope", {"num_hidden_layers": 5}),
    Case(
        "cohere2",
        "window",
        {"num_hidden_layers": 5, "sliding_window": 8, "logit_scale": 0.5}
        | {"tie_word_embeddings": True},
    ),
    Case("starcoder2", "tied", {"sliding_window": None, "tie_word_embeddings": True}),
    Case("seed_oss", "base", {"head_dim": 32, "attention_out_bias": False}),
    Case("arcee", "base", {}),
    Case("exaone4", "window", {"num_hidden_layers": 5, "sliding_window": 8}),
    Case(
        "exaone4",
        "llama3",
        {"sliding_window": None, "layer_types": [FULL, FULL], "rope_parameters": LLAMA3},
    ),
    Case("ernie4_5", "base", {"head_dim": 32}),
    Case("internlm3", "base", {"head_dim": 32}),
    Case("glm", "biases", _GLM | {"attention_bias": True}),
    Case("glm", "tied", _GLM | {"attention_bias": False, "tie_word_embeddings": True}),
    Case("stablelm", "biases", {"use_qkv_bias": True}),
    Case("stablelm", "parallel", {"use_parallel_residual": True, "qk_layernorm": True}),
    Case("apertus", "llama3", {"rope_parameters": LLAMA3}, is_everyday=True),
    Case("gpt2", "tied", {"tie_word_embeddings": True} | _GPT2, is_everyday=True),
    Case("gpt2", "untied", _GPT2),
    Case("ernie4_5_moe", "shared", _ERNIE | {"moe_num_shared_experts": 2}),
    Case(
        "ernie4_5_moe",
        "intervals",
        _ERNIE | {"moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_interval": 2},
    ),
    Case("hunyuan_v1_moe", "base", _HUNYUAN),
    Case(
        "afmoe",
        "window",
        _EXPERTS
        | {"num_hidden_layers": 5, "sliding_window": 8, "head_dim": 32, "mup_enabled": True}
        | {"num_shared_experts": 1, "route_scale": 1.5, "route_norm": True, "score_func": "sigmoid"}
        | {"num_dense_layers": 1},
    ),
    Case("llama4_text", "llama3", _LLAMA4 | {"rope_parameters": LLAMA3}),
    Case(
        "llama4_text",
        "no-norms",
        _LLAMA4 | {"num_local_experts": 128, "intermediate_size": 8, "use_qk_norm": False},
    ),
    Case("mistral4", "yarn", _MISTRAL4),
    Case("gemma4_text", "shared", _GEMMA4, is_everyday=True),
    Case(
        "gemma4_text",
        "mixture",
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "num_hidden_layers": 6}
        | {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1}
        | {"attention_k_eq_v": True, "sliding_window": 8, "enable_moe_block": True}
        | {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
        | {"tie_word_embeddings": True},
    ),
]


def find_case(name: str) -> Case:
    return next(case for case in CASES if str(case) == name)


@functools.cache
def _directory() -> Path:
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    name = f"gguf-{importlib.metadata.version('transformers')}-{source}"
    return ROOT / "build" / "test-checkpoints" / name


def original(case: Case) -> Path:
    """Returns the Hugging Face checkpoint of a case, made once on this machine. Read-only."""
    path = _directory() / str(case)
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as folder:
            made = make(Path(folder) / str(case), case.family, case.settings)
            with contextlib.suppress(OSError):  # another process has just made it
                made.rename(path)
    return path


def make(path: Path, family: str, settings: Json, seed: int = 0) -> Path:
    """Writes a random model of a family, with settings over those of a small Llama."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model_class = class_of(family, LLAMA | settings)
    config = model_class.config_class(**(LLAMA | settings))
    model = model_class(config).float()
    randomize(model, seed)
    model.save_pretrained(path)
    write_tokenizer(path, num_tokens=config.vocab_size - 5)
    return path
