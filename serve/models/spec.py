"""ModelSpec: the description of a decoder, and its reader of config.json.

This module reads no weights. Families map keys to fields; here are the fields of the whole model,
the common checks and the generation defaults. layer_spec.py has the fields of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memory.attention.seam import AttentionLayer
from memory.states.layout import StateLayer
from quant.formats.base import CheckpointFormat
from quant.formats.modelopt import FILE as MODELOPT_FILE
from quant.formats.modelopt import read_hf_quant_config
from quant.formats.read import read_format
from serve.checkpoint_json import ConfigReader, read_json
from serve.errors import ModelLoadError
from serve.models.families import FAMILIES
from serve.models.families.head_spec import HeadSpec
from serve.models.families.layer_spec import AttentionSpec, LatentSpec, LayerSpec, MixtureSpec
from serve.models.families.names import Family
from serve.models.families.rope_spec import RopeSpec
from serve.models.tensors import ParameterCounts

MAX_ALL_EXPERTS = 1 << 17
MAX_ALL_HEADS = 1 << 18
MAX_HEAD_VALUES = 1 << 20  # of all heads of a layer
MAX_STATE_VALUES = 1 << 24  # of a layer
DTYPES = ("float32", "bfloat16", "float16")
EXPERT_COUNTS = {"num_experts", "num_local_experts", "n_routed_experts"}
# keys under which multimodal configurations hold that of their language model
NESTED = ("text_config", "llm_config", "language_config")
# multimodal model_types whose language model's is not theirs with "_text"
_OUTPUTS_FIRST = ("gguf",)  # of which products are [out, in] in every family
_WRAPPERS = {
    "internvl",
    "internvl_chat",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "lfm2_vl",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The numbers and switches of a decoder. Defaults are those of a Llama model.

    norm: "rms" or "layer", for all norms of the hidden state. norm_offset is added to the weights
    of all norms. Learned positions have num_positions rows, and position p uses row
    p + position_offset. embed_size differs from hidden_size if the model projects in and out.
    embed_scale multiplies embeddings, residual_scale what a block's halves add, logit_scale the
    logits; logits become cap * tanh(logit / cap) if logit_soft_cap is not 0. per_layer_vocab: rows
    of the table of per-layer embeddings. tolerates_int8: dtype auto may choose int8. packed: the
    storage format of a quantized checkpoint. is_nested: config.json is that of a multimodal model.
    counts: the numbers of weights of a converted model, which has no row in the table of families.
    draft_head: a head that is loaded with the model, to draft; its K/V is a further layer.
    """

    model_type: str
    torch_dtype: str
    vocab_size: int
    hidden_size: int
    embed_size: int
    max_model_len: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    num_positions: int = 0
    position_offset: int = 0
    norm: str = "rms"
    has_norm_weight: bool = True
    has_norm_bias: bool = False
    norm_offset: float = 0.0
    has_final_norm: bool = True
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    per_layer_vocab: int = 0
    is_tied: bool = False
    has_head_bias: bool = False
    tolerates_int8: bool = True
    packed: CheckpointFormat | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    is_nested: bool = False
    counts: ParameterCounts | None = field(default=None, compare=False)
    draft_head: HeadSpec | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """The layers with K/V as the attention seam sees them, a draft head's last; sinks are known
        when weights are."""
        layers = [attention_layer(layer) for layer in self.layers if layer.attention is not None]
        if self.draft_head is not None:
            layers.append(replace(attention_layer(self.draft_head.layer), is_late=True))
        return layers

    @property
    def state_layers(self) -> list[StateLayer]:
        """The states of the layers that have one."""
        return [layer.state.layer for layer in self.layers if layer.state is not None]

    @property
    def mixtures(self) -> list[MixtureSpec]:
        """The mixtures in the order of their layers."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureSpec)]

    @property
    def ropes(self) -> list[RopeSpec]:
        """The different rotary embeddings of the layers."""
        found = (x.attention.rope for x in self.layers if x.attention is not None)
        return list(dict.fromkeys(rope for rope in found if rope is not None))


def attention_layer(layer: LayerSpec) -> AttentionLayer:
    """Returns what K/V memory and attention kernels need to know of a layer."""
    spec = layer.attention
    assert spec is not None, "a layer with K/V"
    if isinstance(spec, AttentionSpec):
        return AttentionLayer(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=spec.window,
            chunk=spec.chunk,
            soft_cap=spec.soft_cap,
            shares=spec.shares,
        )
    return AttentionLayer(
        num_heads=spec.num_heads,
        num_kv_heads=1,
        head_dim=spec.kv_rank + spec.rope_dim,
        scale=spec.scale,
        value_dim=spec.kv_rank,
    )


def read_spec(path: Path) -> ModelSpec:
    """Reads config.json (and eos ids of generation_config.json) of a Hugging Face directory."""
    whole = read_config(path)
    config = _language_model(whole)
    model_type = config.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        if config is whole and (model_type in _WRAPPERS or f"{model_type}_text" in FAMILIES):
            nested = f"{', '.join(NESTED[:-1])} or {NESTED[-1]}"
            raise config.fail(
                "model_type",
                f"{model_type!r} is multimodal, but the file has no {nested}",
            )
        raise config.fail(
            "model_type", f"{model_type!r} is not supported; known: {', '.join(sorted(FAMILIES))}"
        )
    is_nested = config is not whole
    if is_nested:
        config = _with_defaults(config, family)
    default = whole.text("dtype", whole.text("torch_dtype", "float32"))
    dtype = config.text("dtype", config.text("torch_dtype", default)).removeprefix("torch.")
    if dtype not in DTYPES:
        raise config.fail("dtype", f"{dtype!r} is not supported; known: {', '.join(DTYPES)}")
    bos_ids = config.token_ids("bos_token_id") or whole.token_ids("bos_token_id")
    spec = ModelSpec(
        model_type=model_type,
        torch_dtype=dtype,
        eos_token_ids=read_generation_defaults(path)["eos_token_ids"],
        bos_token_id=bos_ids[0] if bos_ids else None,
        packed=_read_packed(path, whole if whole.has("quantization_config") else config, family),
        is_nested=is_nested,
        **family.fields(config),
    )
    _check_heads(config, spec)
    _check_experts(config, spec)
    _check_states(config, spec)
    return spec


def _with_defaults(config: ConfigReader, family: Family) -> ConfigReader:
    """Returns a nested configuration with what it leaves out."""
    given = {key for key in config.values if config.has(key)}
    if given & EXPERT_COUNTS:  # names of one number
        given |= EXPERT_COUNTS
    missing = {key: value for key, value in family.nested_defaults.items() if key not in given}
    return ConfigReader(config.values | missing, config.source)


def read_language_config(path: Path) -> ConfigReader:
    """Returns the reader of the language model's configuration in a directory."""
    return _language_model(read_config(path))


def _language_model(config: ConfigReader) -> ConfigReader:
    """Returns the reader of the language model's configuration, which may be nested."""
    nested = [key for key in NESTED if config.has(key)]
    if not nested:
        return config
    key = nested[0]
    values = config.values[key]
    if len(nested) > 1 or not isinstance(values, dict):
        raise config.fail(" and ".join(nested), "must be one object, the language model's")
    if any(values.get(other) is not None for other in NESTED):
        raise config.fail(key, "holds another nested configuration")
    # a key of the whole model is that of its language model; text_config only repeats it
    inherited = {
        name: config.values[name]
        for name in ("tie_word_embeddings", "vocab_size")
        if config.has(name) and (name == "tie_word_embeddings" or values.get(name) is None)
    }
    values = values | inherited
    values.setdefault("model_type", config.values.get("model_type"))
    return ConfigReader(values, f"{config.source}: {key}")


def read_config(path: Path, *, is_converted: bool = False) -> ConfigReader:
    """Reads config.json of a directory. ModelLoadError if it refers to code. is_converted: the code
    is that of a class of the installed Transformers, so that none of the directory is needed."""
    if path.is_file():
        raise ModelLoadError(f"model {path} is a file, not a directory of a checkpoint")
    if path.exists() and not path.is_dir():
        raise ModelLoadError(f"model {path} is neither a directory nor a file")
    if not path.is_dir():
        raise ModelLoadError(
            f"model directory {path} does not exist; `serve pull ORG/NAME` downloads a model and"
            " prints its directory"
        )
    source = path / "config.json"
    if not source.exists():
        raise ModelLoadError(f"{path} has no config.json; a Hugging Face model directory is needed")
    config = ConfigReader(read_json(source), str(source))
    model_type = _language_model(config).values.get("model_type")
    is_known = is_converted or (isinstance(model_type, str) and model_type in FAMILIES)
    if config.has("auto_map") and not is_known:
        raise config.fail(
            "auto_map", "asks for code from the checkpoint, which is never run; use a plain model"
        )
    return config


def _read_packed(path: Path, config: ConfigReader, family: Family) -> CheckpointFormat | None:
    quantization = config.values.get("quantization_config")
    if quantization is None:
        return _read_modelopt(path / MODELOPT_FILE)
    if not isinstance(quantization, dict):
        raise config.fail("quantization_config", f"must be an object, not {quantization!r}")
    method = quantization.get("quant_method")
    if family.names.is_transposed and method not in _OUTPUTS_FIRST:
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


def _read_modelopt(source: Path) -> CheckpointFormat | None:
    if not source.exists():
        return None
    try:
        return read_hf_quant_config(read_json(source))
    except ValueError as error:
        raise ModelLoadError(f"{source}: {error}") from error


def read_generation_defaults(path: Path, *, is_converted: bool = False) -> dict[str, Any]:
    """Returns eos_token_ids, and the sampling parameters that generation_config.json sets.

    These are temperature, top_p, top_k, min_p and repetition_penalty. eos ids of
    generation_config.json take precedence over those of config.json. is_converted: as in
    read_config.
    """
    whole = read_config(path, is_converted=is_converted)
    config_ids = _language_model(whole).token_ids("eos_token_id") or whole.token_ids("eos_token_id")
    source = path / "generation_config.json"
    if not source.exists():
        return {"eos_token_ids": config_ids}
    generation = ConfigReader(read_json(source), str(source))
    eos_ids = generation.token_ids("eos_token_id") or config_ids
    defaults: dict[str, Any] = {"eos_token_ids": eos_ids}
    for key in ("temperature", "top_p", "min_p", "repetition_penalty"):
        if generation.has(key):
            defaults[key] = generation.number(key)
    if generation.has("top_k"):
        defaults["top_k"] = generation.integer("top_k", low=-1)
    return defaults


def _check_experts(config: ConfigReader, spec: ModelSpec) -> None:
    """Bounds the tensors that are looked for before the first is known to exist."""
    total = sum(mixture.num_experts for mixture in spec.mixtures)
    if total > MAX_ALL_EXPERTS:
        raise ModelLoadError(
            f"{config.source}: {total} experts in all layers; at most {MAX_ALL_EXPERTS} are read"
        )


def _check_states(config: ConfigReader, spec: ModelSpec) -> None:
    """Bounds what is made of a layer's state before a tensor is known to exist."""
    for state in dict.fromkeys(spec.state_layers):
        largest = max(state.num_bytes // 4, 64 * state.row_values)
        if largest > MAX_STATE_VALUES:
            raise ModelLoadError(
                f"{config.source}: the state of a layer has {state.num_bytes // 4} values, computed"
                f" from {state.row_values} in a row; at most {MAX_STATE_VALUES} and"
                f" {MAX_STATE_VALUES // 64} are read"
            )


def _check_heads(config: ConfigReader, spec: ModelSpec) -> None:
    layers = spec.attention_layers
    if not layers:
        raise ModelLoadError(f"{config.source}: no layer has attention, which is not supported")
    for layer in dict.fromkeys(layers):
        if layer.num_heads % layer.num_kv_heads:
            raise ModelLoadError(
                f"{config.source}: {layer.num_heads} attention heads cannot be divided among "
                f"{layer.num_kv_heads} key/value heads"
            )
    inner = (each.attention for each in set(spec.layers))
    widths = [x.nope_dim + x.rope_dim + x.v_dim for x in inner if isinstance(x, LatentSpec)]
    largest = max(layer.num_heads * max([layer.head_dim, *widths]) for layer in layers)
    if largest > MAX_HEAD_VALUES or sum(layer.num_heads for layer in layers) > MAX_ALL_HEADS:
        raise ModelLoadError(
            f"{config.source}: {largest} values in the heads of a layer and "
            f"{sum(layer.num_heads for layer in layers)} heads in all layers; at most "
            f"{MAX_HEAD_VALUES} and {MAX_ALL_HEADS} are read"
        )
