"""Converts a checkpoint to W8A8 for vLLM: python bench/peers/convert_vllm.py CHECKPOINT OUT.

It runs in vLLM's virtual environment and writes the compressed-tensors format: int8 weights with a
scale for each output channel, and activations that vLLM quantizes per token. Embeddings, routers of
mixtures and lm_head stay as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}


def convert(checkpoint: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(checkpoint.glob("*.safetensors"))
    weight_map: dict[str, str] = {}
    for path in files:
        tensors = dict(_converted(path))
        save_file(tensors, out / path.name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((checkpoint / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint / name, out / name)


def _converted(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a file, products as int8 with their scales."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            weight = file.get_tensor(name)
            if not name.endswith("_proj.weight"):
                yield name, weight.clone()
                continue
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).clamp_(min=1e-8)
            yield name, (weight.float() / scale).round_().clamp_(-127, 127).to(torch.int8)
            yield f"{name}_scale", scale.bfloat16()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    convert(args.checkpoint, args.out)
