"""The keys that llama.cpp's conversion writes for each architecture, beside those of all."""

from __future__ import annotations

import math

import gguf
from safetensors.torch import load_file

from tests.support.engine.variants.variant import Json
from tests.support.gguf.changes import head_dim, of_full_layers


def llama_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(head_dim(config))


def moe_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def granite_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    llama_keys(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def gemma2_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def window(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_sliding_window(config["sliding_window"])


def window_pattern(writer: gguf.GGUFWriter, config: Json) -> None:
    if config.get("sliding_window"):
        window(writer, config)
        types = config["layer_types"]
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in types])


def phi3_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    rope = config["rope_parameters"]
    dim = int(rope.get("partial_rotary_factor", 1.0) * head_dim(config))
    writer.add_rope_dimension_count(dim)
    pretrained = config["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(pretrained)
    writer.add_sliding_window(config.get("sliding_window") or 0)
    if rope.get("long_factor"):
        scale = config["max_position_embeddings"] / pretrained
        factor = math.sqrt(1 + math.log(scale) / math.log(pretrained)) if scale > 1 else 1.0
        writer.add_rope_scaling_attn_factors(factor)


def gpt_oss_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    window(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def glm_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    partial = config["rope_parameters"].get("partial_rotary_factor", 0.5)
    writer.add_rope_dimension_count(int(head_dim(config) * partial))


def glm_moe_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    glm_keys(writer, config)
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def dots_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def latent_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    """Writes the sizes of the latent, as one head of keys and values."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    for name in ("head_count_kv", "key_length", "value_length"):
        writer.kv_data[0].pop(f"{writer.arch}.attention.{name}", None)
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    deepseek_keys(writer, config)


def old_latent_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    """Writes the sizes of heads, as the first files had them."""
    for name in ("key_length", "value_length"):
        writer.kv_data[0].pop(f"{writer.arch}.attention.{name}", None)
    writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["v_head_dim"])
    deepseek_keys(writer, config)


def deepseek_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    scale = config["rope_parameters"].get("mscale_all_dim")
    if scale is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def minimax_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    partial = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(config.get("rotary_dim", int(head_dim(config) * partial)))
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def mistral3_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    llama_keys(writer, config)
    rope = config["rope_parameters"]
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def hunyuan_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    """Writes the stretched base of the rotary embedding, which is all that alpha means."""
    rope, dim = config["rope_parameters"], head_dim(config)
    base = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
    writer.kv_data[0].pop(f"{writer.arch}.rope.freq_base")
    writer.add_rope_freq_base(base)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)
    writer.add_rope_scaling_orig_ctx_len(config["max_position_embeddings"])


def cohere_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    window(writer, config)


def chatglm_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    """Writes all keys of the architecture."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["seq_length"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["layernorm_epsilon"])
    writer.add_file_type(0)
    partial = config["rope_parameters"].get("partial_rotary_factor", 0.5)
    dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(dim * partial))
    writer.add_rope_freq_base(10000 * config["rope_ratio"])


def stablelm_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    """Writes all keys of the architecture."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    dim = config["hidden_size"] // config["num_attention_heads"]
    partial = config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(dim * partial))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_parallel_residual(config["use_parallel_residual"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_file_type(0)


def gpt2_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    """Writes all keys of the architecture."""
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_file_type(0)


def apertus_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    """Writes the numbers of the activations, which are tensors of the checkpoint."""
    llama_keys(writer, config)
    tensors = load_file(f"{config['source']}/model.safetensors")
    for name, add in (
        ("alpha_n", writer.add_xielu_alpha_n),
        ("alpha_p", writer.add_xielu_alpha_p),
        ("beta", writer.add_xielu_beta),
        ("eps", writer.add_xielu_eps),
    ):
        layers = range(config["num_hidden_layers"])
        add([tensors[f"model.layers.{at}.mlp.act_fn.{name}"].float().item() for at in layers])


def ernie_moe_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    if config["moe_num_shared_experts"]:
        shared = config["intermediate_size"] // config["num_key_value_heads"]
        writer.add_expert_shared_feed_forward_length(shared)


def hunyuan_moe_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"][0])
    writer.add_expert_used_count(config["moe_topk"][0])
    writer.add_expert_shared_count(config["num_shared_expert"][0])
    if config["rope_parameters"]["rope_type"] == "dynamic":
        hunyuan_keys(writer, config)


def afmoe_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    llama_keys(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_weights_norm(config["route_norm"])
    writer.add_expert_weights_scale(config["route_scale"])
    writer.add_sliding_window(config["sliding_window"])


def llama4_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    llama_keys(writer, config)
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def mistral4_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    latent_keys(writer, config)
    if config["rope_parameters"]["llama_4_scaling_beta"]:
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])


def gemma4_keys(writer: gguf.GGUFWriter, config: Json) -> None:
    types, num_layers = config["layer_types"], config["num_hidden_layers"]
    window(writer, config)
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    shared = config["num_kv_shared_layers"]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"] or 0)
    is_windowed = [kind == "sliding_attention" for kind in types]
    writer.add_sliding_window_pattern(is_windowed)
    whole, windowed = of_full_layers(config, "head_dim"), config["head_dim"]
    writer.add_key_length(whole)
    writer.add_value_length(whole)
    writer.add_key_length_swa(windowed)
    writer.add_value_length_swa(windowed)
    if config.get("moe_intermediate_size") is not None:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["use_double_wide_mlp"]:
        size, first = config["intermediate_size"], num_layers - shared
        writer.add_feed_forward_length([size * (1 + (at >= first)) for at in range(num_layers)])
    own, heads = of_full_layers(config, "num_key_value_heads"), config["num_key_value_heads"]
    if own != heads:
        writer.add_head_count_kv([heads if each else own for each in is_windowed])
    writer.add_rope_dimension_count(whole)
    writer.add_rope_dimension_count_swa(windowed)
