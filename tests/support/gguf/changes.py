"""What llama.cpp's conversion does to the tensors of each architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.support.engine.variants.variant import Json

Named = tuple[str, Tensor]
Change = Callable[[Json, str, Tensor], Iterator[Named]]


def head_dim(config: Json) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def as_it_is(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    yield name, tensor


def permuted(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Interleaves the halves of each head of q and k."""
    for module, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if name.endswith((f"{module}.weight", f"{module}.bias")):
            halves = tensor.unflatten(0, (config[key], 2, -1))
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
    yield name, tensor


def with_norms_plus_one(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def llama_extra(config: Json) -> Iterator[Named]:
    """Yields the divisors of the frequencies that Llama 3's scaling stands for."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), torch.device("cpu"))
    size = head_dim(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    yield "rope_freqs.weight", plain / scaled


def split_experts(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields gate and up of fused experts, [experts, 2 * size, hidden], apart."""
    if name.endswith("experts.gate_up_proj"):
        start = name.removesuffix("gate_up_proj")
        gate, up = tensor.chunk(2, 1)
        yield f"{start}gate_proj.weight", gate
        yield f"{start}up_proj.weight", up
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def transposed_experts(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields gate and up of gpt-oss apart, which are stored in turn and [experts, in, out]."""
    start, _, ending = name.rpartition(".experts.")
    is_bias = ending.endswith("_bias")
    suffix = "bias" if is_bias else "weight"
    if start and not is_bias:
        tensor = tensor.transpose(1, 2)
    if ending.startswith("gate_up_proj"):
        yield f"{start}.experts.gate_proj.{suffix}", tensor[:, ::2]
        yield f"{start}.experts.up_proj.{suffix}", tensor[:, 1::2]
    elif start:
        yield f"{start}.experts.down_proj.{suffix}", tensor
    else:
        yield f"{name}.weight" if name.endswith("sinks") else name, tensor


def granite_experts(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    start = name.removesuffix("input_linear.weight")
    if start == name:
        yield from permuted(config, name, tensor)
        return
    gate, up = tensor.chunk(2, 1)
    layer = name.split(".layers.")[1].split(".")[0]
    yield f"model.layers.{layer}.mlp.experts.gate_proj.weight", gate
    yield f"model.layers.{layer}.mlp.experts.up_proj.weight", up


def mixtral_experts(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    for changed, value in permuted(config, name, tensor):
        yield from split_experts(config, changed, value)


def with_correction(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    yield from split_experts(config, name, tensor)


def split_expansion(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields the expansion of a latent apart: of keys, transposed, and of values."""
    start = name.removesuffix("kv_b_proj.weight")
    if start == name:
        yield from with_correction(config, name, tensor)
        return
    heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
    size = config["qk_nope_head_dim"]
    yield f"{start}k_b_proj.weight", heads[:, :size].transpose(1, 2)
    yield f"{start}v_b_proj.weight", heads[:, size:]


def without_head(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields the tensors of Gemma, whose head is always the embedding."""
    if name != "lm_head.weight":
        yield from with_norms_plus_one(config, name, tensor)


def phi3_extra(config: Json) -> Iterator[Named]:
    rope = config["rope_parameters"]
    for kind in ("long", "short"):
        if rope.get(f"{kind}_factor"):
            yield f"rope_factors_{kind}.weight", torch.tensor(rope[f"{kind}_factor"])


def outputs_first(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields GPT-2's products with their outputs first, as those that are packed already are."""
    yield name, tensor.t() if is_gpt2_product(name) and tensor.is_floating_point() else tensor


def is_gpt2_product(name: str) -> bool:
    return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def without_activation(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields what is no number of an activation, which are keys."""
    if ".act_fn." not in name:
        yield name, tensor


def afmoe_experts(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    yield from split_experts(config, name.replace(".expert_bias", ".expert_bias.bias"), tensor)


def llama4_experts(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields gate and up apart, which are stored [experts, in, 2 * size] as down is transposed."""
    if name.endswith((".gate_up_proj", "experts.down_proj")):
        tensor = tensor.transpose(1, 2)
    yield from split_experts(config, name, tensor)


def mistral4_tensors(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields fused experts as they are, and the expansion of a latent apart."""
    if name.endswith((".gate_up_proj", "experts.down_proj")):
        yield f"{name}.weight", tensor
    else:
        yield from split_expansion(config, name, tensor)


def gemma4_tensors(config: Json, name: str, tensor: Tensor) -> Iterator[Named]:
    """Yields the scales of a router and of its experts under their own names."""
    layer = name.partition(".layers.")[2].partition(".")[0]
    if name == "lm_head.weight":
        return
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", tensor
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", tensor
    elif name.endswith("layer_scalar") or ".experts." in name:
        yield f"{name}.weight", tensor
    else:
        yield name, tensor


def gemma4_extra(config: Json) -> Iterator[Named]:
    """Yields divisors of frequencies: 1 of the pairs that rotate, and so large that others do
    not."""
    half = of_full_layers(config, "head_dim") // 2
    rotated = int(half * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    yield "rope_freqs.weight", torch.tensor([1.0] * rotated + [1e30] * (half - rotated))


def of_full_layers(config: Json, key: str) -> int:
    """Returns a number of Gemma 4's layers without windows."""
    for layer, kind in enumerate(config["layer_types"]):
        own = (config.get("per_layer_config") or {}).get(str(layer), {})
        if kind == "full_attention" and key in own:
            return int(own[key])
    return int(config[key])
