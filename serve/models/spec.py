"""ModelSpec: the switches of the decoder, read from config.json.

This module reads no weights. families.py maps keys to switches; here are the spec, the common
checks and the generation defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory.attention.seam import AttentionLayer
from quant.checkpoint_formats import CheckpointFormat, read_format
from serve.errors import ModelLoadError
from serve.models.config_file import ConfigReader, read_json
from serve.models.families import FAMILIES, Family
from serve.models.rope import RopeSpec

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The numbers and switches of a decoder. Defaults are those of a Llama block.

    norm: "rms" or "layer". is_post_norm: normalize after the residual sum instead of before the
    block. activation: a kind of Backend.activation. rope and num_positions exclude each other:
    learned positions have num_positions rows, and position p uses row p + position_offset.
    embed_size differs from hidden_size if the model projects in and out. windows, scales: one per
    layer. tolerates_int8: dtype auto may choose int8. packed: the storage format of a quantized
    checkpoint.
    """

    model_type: str
    torch_dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: int
    norm_eps: float
    windows: tuple[int | None, ...]
    scales: tuple[float, ...]
    embed_size: int
    rope: RopeSpec | None = None
    num_positions: int = 0
    position_offset: int = 0
    norm: str = "rms"
    has_norm_weight: bool = True
    has_norm_bias: bool = False
    is_post_norm: bool = False
    has_final_norm: bool = True
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    is_gated: bool = True
    activation: str = "silu"
    is_tied: bool = False
    tolerates_int8: bool = True
    packed: CheckpointFormat | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return [
            AttentionLayer(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=scale,
                window=window,
            )
            for scale, window in zip(self.scales, self.windows, strict=True)
        ]

    @property
    def num_parameters(self) -> int:
        """The number of weights and biases; a tied table counts once."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        ups = 2 if self.is_gated else 1
        norm = hidden * (self.has_norm_weight + self.has_norm_bias)
        layer = 2 * norm + (2 * self.head_dim if self.has_qk_norm else 0)
        layer += hidden * (2 * q_size + 2 * kv_size) + (ups + 1) * hidden * inner
        layer += (q_size + 2 * kv_size if self.has_qkv_bias else 0) + hidden * self.has_o_bias
        layer += (ups * inner + hidden) if self.has_mlp_bias else 0
        ends = self.vocab_size * self.embed_size * (1 if self.is_tied else 2)
        ends += self.num_positions * hidden + (norm if self.has_final_norm else 0)
        if self.embed_size != hidden:
            ends += 2 * self.embed_size * hidden
        return self.num_layers * layer + ends


def read_spec(path: Path) -> ModelSpec:
    """Reads config.json (and eos ids of generation_config.json) of a Hugging Face directory."""
    config = read_config(path)
    model_type = config.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        raise config.fail(
            "model_type", f"{model_type!r} is not supported; known: {', '.join(sorted(FAMILIES))}"
        )
    dtype = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise config.fail("dtype", f"{dtype!r} is not supported; known: {', '.join(DTYPES)}")
    bos_ids = config.token_ids("bos_token_id")
    spec = ModelSpec(
        model_type=model_type,
        torch_dtype=dtype,
        eos_token_ids=read_generation_defaults(path)["eos_token_ids"],
        bos_token_id=bos_ids[0] if bos_ids else None,
        packed=_read_packed(config, family),
        **family.switches(config),
    )
    _check_heads(config, spec)
    return spec


def read_config(path: Path) -> ConfigReader:
    """Reads config.json of a directory. ModelLoadError if it refers to code."""
    if path.is_file():
        raise ModelLoadError(f"model {path} is a file, not a directory of a checkpoint")
    if path.exists() and not path.is_dir():
        raise ModelLoadError(f"model {path} is neither a directory nor a file")
    if not path.is_dir():
        raise ModelLoadError(
            f"model directory {path} does not exist (nothing is downloaded by its name)"
        )
    source = path / "config.json"
    if not source.exists():
        raise ModelLoadError(f"{path} has no config.json; a Hugging Face model directory is needed")
    config = ConfigReader(read_json(source), str(source))
    if config.has("auto_map"):
        raise config.fail(
            "auto_map", "asks for code from the checkpoint, which is never run; use a plain model"
        )
    return config


def _read_packed(config: ConfigReader, family: Family) -> CheckpointFormat | None:
    quantization = config.values.get("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise config.fail("quantization_config", f"must be an object, not {quantization!r}")
    method = quantization.get("quant_method")
    if family.names.is_transposed:
        raise config.fail(
            "quantization_config",
            f"(quant_method {method!r}) is not supported for this model_type; use the plain model",
        )
    try:
        return read_format(quantization)
    except ValueError as error:
        at = "quantization_config"
        if "quant_method" not in str(error):
            at += f" (quant_method {method!r})"
        raise config.fail(f"{at}:", str(error)) from error


def read_generation_defaults(path: Path) -> dict[str, Any]:
    """Returns eos_token_ids, and the sampling parameters that generation_config.json sets.

    These are temperature, top_p, top_k, min_p and repetition_penalty. eos ids of
    generation_config.json take precedence over those of config.json.
    """
    config = read_config(path)
    source = path / "generation_config.json"
    if not source.exists():
        return {"eos_token_ids": config.token_ids("eos_token_id")}
    generation = ConfigReader(read_json(source), str(source))
    eos_ids = generation.token_ids("eos_token_id") or config.token_ids("eos_token_id")
    defaults: dict[str, Any] = {"eos_token_ids": eos_ids}
    for key in ("temperature", "top_p", "min_p", "repetition_penalty"):
        if generation.has(key):
            defaults[key] = generation.number(key)
    if generation.has("top_k"):
        defaults["top_k"] = generation.integer("top_k", low=-1)
    return defaults


def _check_heads(config: ConfigReader, spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise ModelLoadError(
            f"{config.source}: {spec.num_heads} attention heads cannot be divided among "
            f"{spec.num_kv_heads} key/value heads"
        )
