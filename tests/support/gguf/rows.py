"""How llama.cpp's conversion writes each architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gguf

from tests.support.engine.variants.variant import Json
from tests.support.gguf import changes, row_keys
from tests.support.gguf.changes import Change, Named, as_it_is


class Row:
    """How an architecture is written. has_common_keys: its keys are beside those of all."""

    def __init__(
        self,
        arch: gguf.MODEL_ARCH,
        change: Change = as_it_is,
        keys: Callable[[gguf.GGUFWriter, Json], Any] = lambda writer, config: None,
        extra: Callable[[Json], Iterator[Named]] = lambda config: iter(()),
        *,
        has_common_keys: bool = True,
    ) -> None:
        self.arch = arch
        self.change = change
        self.keys = keys
        self.extra = extra
        self.has_common_keys = has_common_keys


_ARCH = gguf.MODEL_ARCH
ROWS = {
    "llama": Row(_ARCH.LLAMA, changes.permuted, row_keys.llama_keys, changes.llama_extra),
    "mistral": Row(_ARCH.LLAMA, changes.permuted, row_keys.llama_keys, changes.llama_extra),
    "mixtral": Row(_ARCH.LLAMA, changes.mixtral_experts, row_keys.llama_keys, changes.llama_extra),
    "qwen2": Row(_ARCH.QWEN2),
    "qwen3": Row(_ARCH.QWEN3),
    "qwen2_moe": Row(_ARCH.QWEN2MOE, changes.split_experts, row_keys.moe_keys),
    "qwen3_moe": Row(_ARCH.QWEN3MOE, changes.split_experts, row_keys.moe_keys),
    "olmo2": Row(_ARCH.OLMO2),
    "olmo3": Row(_ARCH.OLMO2, keys=row_keys.window_pattern),
    "olmoe": Row(_ARCH.OLMOE, changes.split_experts),
    "gemma2": Row(_ARCH.GEMMA2, changes.without_head, row_keys.gemma2_keys),
    "gemma3_text": Row(_ARCH.GEMMA3, changes.without_head, row_keys.window),
    "phi3": Row(_ARCH.PHI3, keys=row_keys.phi3_keys, extra=changes.phi3_extra),
    "granite": Row(_ARCH.GRANITE, changes.permuted, row_keys.granite_keys, changes.llama_extra),
    "granitemoe": Row(
        _ARCH.GRANITE_MOE, changes.granite_experts, row_keys.granite_keys, changes.llama_extra
    ),
    "gpt_oss": Row(_ARCH.GPT_OSS, changes.transposed_experts, row_keys.gpt_oss_keys),
    "glm4": Row(_ARCH.GLM4, keys=row_keys.glm_keys),
    "glm4_moe": Row(_ARCH.GLM4_MOE, changes.with_correction, row_keys.glm_moe_keys),
    "dots1": Row(_ARCH.DOTS1, changes.with_correction, row_keys.dots_keys),
    "deepseek_v2": Row(_ARCH.DEEPSEEK2, changes.with_correction, row_keys.old_latent_keys),
    "deepseek_v3": Row(_ARCH.DEEPSEEK2, changes.split_expansion, row_keys.latent_keys),
    "minimax_m2": Row(_ARCH.MINIMAXM2, changes.with_correction, row_keys.minimax_keys),
    "ministral3": Row(_ARCH.MISTRAL3, changes.permuted, row_keys.mistral3_keys),
    "hunyuan_v1_dense": Row(_ARCH.HUNYUAN_DENSE, keys=row_keys.hunyuan_keys),
    "smollm3": Row(_ARCH.SMOLLM3, changes.permuted, row_keys.llama_keys, changes.llama_extra),
    "cohere2": Row(_ARCH.COHERE2, keys=row_keys.cohere_keys),
    "starcoder2": Row(_ARCH.STARCODER2),
    "seed_oss": Row(_ARCH.SEED_OSS),
    "arcee": Row(_ARCH.ARCEE, changes.permuted, row_keys.llama_keys, changes.llama_extra),
    "exaone4": Row(_ARCH.EXAONE4, keys=row_keys.window_pattern, extra=changes.llama_extra),
    "ernie4_5": Row(_ARCH.ERNIE4_5),
    "internlm3": Row(_ARCH.LLAMA, changes.permuted, row_keys.llama_keys, changes.llama_extra),
    "glm": Row(_ARCH.CHATGLM, keys=row_keys.chatglm_keys, has_common_keys=False),
    "stablelm": Row(_ARCH.STABLELM, keys=row_keys.stablelm_keys, has_common_keys=False),
    "gpt2": Row(_ARCH.GPT2, changes.outputs_first, row_keys.gpt2_keys, has_common_keys=False),
    "apertus": Row(
        _ARCH.APERTUS, changes.without_activation, row_keys.apertus_keys, changes.llama_extra
    ),
    "ernie4_5_moe": Row(_ARCH.ERNIE4_5_MOE, changes.with_correction, row_keys.ernie_moe_keys),
    "hunyuan_v1_moe": Row(_ARCH.HUNYUAN_MOE, changes.split_experts, row_keys.hunyuan_moe_keys),
    "afmoe": Row(_ARCH.AFMOE, changes.afmoe_experts, row_keys.afmoe_keys),
    "llama4_text": Row(
        _ARCH.LLAMA4, changes.llama4_experts, row_keys.llama4_keys, changes.llama_extra
    ),
    "mistral4": Row(_ARCH.MISTRAL4, changes.mistral4_tensors, row_keys.mistral4_keys),
    "gemma4_text": Row(
        _ARCH.GEMMA4, changes.gemma4_tensors, row_keys.gemma4_keys, changes.gemma4_extra
    ),
}
