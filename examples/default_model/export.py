"""Writes a model folder for serve/ and Hugging Face: bfloat16 weights, configs and tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from examples.default_model.data import BOS, END, Encoder
from examples.default_model.model import Llama

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_model(out: Path, model: Llama, tokenizer: Tokenizer) -> None:
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in model.named_parameters()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    ids = Encoder(tokenizer).ids
    name = "Mixtral" if model.shape.num_local_experts else "Llama"
    _write_json(
        out / "config.json",
        {
            "architectures": [f"{name}ForCausalLM"],
            "model_type": name.lower(),
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "rope_scaling": None,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": ids[BOS],
            "eos_token_id": ids[END],
            "pad_token_id": ids[END],
            **model.shape.as_dict(),
        },
    )
    _write_json(
        out / "generation_config.json",
        {
            "bos_token_id": ids[BOS],
            "eos_token_id": ids[END],
            "pad_token_id": ids[END],
            "do_sample": True,
            "temperature": 0.5,
            "top_p": 0.9,
        },
    )
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": END,
            "pad_token": END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.shape.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def read_weights(out: Path, model: Llama) -> None:
    """Loads the weights that write_model wrote, so that the model is rounded as the file is."""
    weights = load_file(out / "model.safetensors")
    model.load_state_dict({n.removeprefix("model."): w.float() for n, w in weights.items()})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
