"""Values of keys that configurations of multimodal models leave out.

Transformers writes of a nested configuration only what differs from the defaults of the family's
configuration class, so these are those defaults. A configuration of its own always has its sizes.
"""

from __future__ import annotations

Defaults = dict[str, object]


def _sizes(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, max_len: int, **others: object
) -> Defaults:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": max_len,
        **others,
    }


NESTED_DEFAULTS: dict[str, Defaults] = {
    "llama": _sizes(32_000, 4_096, 11_008, 32, 32, 2_048),
    "qwen2": _sizes(151_936, 4_096, 22_016, 32, 32, 32_768),
    "qwen3": _sizes(151_936, 4_096, 22_016, 32, 32, 32_768),
    "mistral": _sizes(32_000, 4_096, 14_336, 32, 32, 131_072),
    "smollm3": _sizes(128_256, 2_048, 11_008, 36, 16, 32_768),
    "granite": _sizes(32_000, 4_096, 11_008, 32, 32, 2_048),
    "seed_oss": _sizes(155_136, 4_096, 27_648, 64, 80, 524_288),
    "arcee": _sizes(32_000, 2_560, 18_432, 32, 32, 4_096),
    "internlm3": _sizes(128_512, 4_096, 10_240, 48, 32, 32_768),
    "ernie4_5": _sizes(103_424, 1_024, 3_072, 18, 16, 131_072),
    "apertus": _sizes(131_072, 4_096, 14_336, 32, 32, 65_536),
    "hunyuan_v1_dense": _sizes(290_943, 4_096, 11_008, 32, 32, 2_048),
    "phi3": _sizes(32_064, 3_072, 8_192, 32, 32, 4_096),
    "ministral3": _sizes(131_072, 4_096, 14_336, 34, 32, 262_144),
    "stablelm": _sizes(50_304, 2_560, 6_912, 32, 32, 4_096),
    "starcoder2": _sizes(49_152, 3_072, 12_288, 30, 24, 4_096),
    "olmo2": _sizes(50_304, 4_096, 11_008, 32, 32, 2_048),
    "olmo3": _sizes(50_304, 4_096, 11_008, 32, 32, 2_048),
    "exaone4": _sizes(102_400, 4_096, 16_384, 32, 32, 2_048),
    "cohere2": _sizes(256_000, 8_192, 22_528, 40, 64, 8_192),
    "glm": _sizes(151_552, 4_096, 13_696, 40, 32, 131_072),
    "glm4": _sizes(151_552, 4_096, 13_696, 40, 32, 131_072),
    "gemma2": _sizes(256_000, 2_304, 9_216, 26, 8, 8_192),
    "gemma3_text": _sizes(262_208, 2_304, 9_216, 26, 8, 131_072),
    "qwen3_moe": _sizes(
        151_936,
        2_048,
        6_144,
        24,
        32,
        32_768,
        num_local_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "qwen2_moe": _sizes(
        151_936,
        2_048,
        5_632,
        24,
        16,
        32_768,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    ),
    "mixtral": _sizes(
        32_000, 4_096, 14_336, 32, 32, 131_072, num_local_experts=8, num_experts_per_tok=2
    ),
    "olmoe": _sizes(50_304, 2_048, 2_048, 16, 16, 4_096, num_experts=64, num_experts_per_tok=8),
    "granitemoe": _sizes(
        32_000, 4_096, 11_008, 32, 32, 2_048, num_local_experts=8, num_experts_per_tok=2
    ),
    "gpt_oss": _sizes(
        201_088, 2_880, 2_880, 36, 64, 131_072, num_local_experts=128, num_experts_per_tok=4
    ),
    "glm4_moe": _sizes(
        151_552,
        4_096,
        10_944,
        46,
        96,
        131_072,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
    ),
    "dots1": _sizes(152_064, 4_608, 10_944, 62, 32, 2_048, moe_intermediate_size=1408),
    "minimax_m2": _sizes(
        200_064, 3_072, 1_536, 62, 48, 196_608, num_local_experts=256, num_experts_per_tok=8
    ),
    "ernie4_5_moe": _sizes(
        103_424,
        2_560,
        12_288,
        28,
        20,
        131_072,
        moe_num_experts=64,
        moe_k=6,
        moe_intermediate_size=1536,
    ),
    "hunyuan_v1_moe": _sizes(290_943, 4_096, 11_008, 32, 32, 2_048, num_experts=1, moe_topk=1),
    "llama4_text": _sizes(
        202_048, 5_120, 8_192, 48, 40, 131_072, num_local_experts=16, num_experts_per_tok=1
    ),
    "gemma4_text": _sizes(262_144, 2_304, 9_216, 30, 8, 131_072),
    "deepseek_v2": _sizes(
        102_400, 4_096, 11_008, 32, 32, 2_048, n_routed_experts=64, moe_intermediate_size=1407
    ),
    "deepseek_v3": _sizes(
        129_280,
        7_168,
        18_432,
        61,
        128,
        4_096,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
    ),
    "glm4_moe_lite": _sizes(
        154_880,
        2_048,
        10_240,
        47,
        20,
        202_752,
        n_routed_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
    ),
    "mistral4": _sizes(
        131_072,
        4_096,
        12_288,
        36,
        32,
        1_048_576,
        n_routed_experts=128,
        num_experts_per_tok=4,
        moe_intermediate_size=2048,
    ),
}
_QWEN2_VL = _sizes(
    152_064,
    8_192,
    29_568,
    80,
    64,
    32_768,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
)
NESTED_DEFAULTS |= {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": _sizes(151_936, 4_096, 22_016, 32, 32, 128_000, rope_theta=5e5),
    "qwen3_vl_moe_text": _sizes(
        151_936,
        2_048,
        5_632,
        24,
        16,
        128_000,
        num_key_value_heads=16,
        rope_theta=5e5,
        tie_word_embeddings=True,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1_408,
        norm_topk_prob=True,
    ),
    "afmoe": _sizes(
        200_192,
        2_048,
        6_144,
        32,
        16,
        16_384,
        num_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1_408,
    ),
}
_LFM2 = _sizes(65_536, 2_560, 12_288, 32, 32, 128_000)
_QWEN3_NEXT = _sizes(
    151_936,
    2_048,
    5_632,
    48,
    16,
    32_768,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
)
NESTED_DEFAULTS |= {
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2
    | {
        "hidden_size": 2_048,
        "intermediate_size": 7_168,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _sizes(248_320, 4_096, 12_288, 32, 16, 32_768),
    "qwen3_5_moe_text": _QWEN3_NEXT
    | {
        "vocab_size": 248_320,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "bamba": _sizes(128_000, 4_096, 14_336, 32, 32, 262_144),
    "granitemoehybrid": _sizes(32_000, 4_096, 11_008, 32, 32, 2_048),
    "falcon_h1": _sizes(128_000, 4_096, 14_336, 32, 32, 8_192),
    "nemotron_h": _sizes(
        131_072,
        4_096,
        21_504,
        4,
        32,
        4_096,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=7_688,
    ),
    "olmo_hybrid": _sizes(100_352, 3_840, 11_008, 32, 30, 65_536),
    "kimi_linear": _sizes(
        163_840,
        2_304,
        9_216,
        27,
        32,
        1_048_576,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=1_024,
    ),
}
NESTED_DEFAULTS["kimi_k2"] = NESTED_DEFAULTS["deepseek_v3"]
