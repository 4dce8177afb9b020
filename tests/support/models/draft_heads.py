"""Checkpoints with MTP layers and EAGLE-3 heads, random ones, and slow references of both."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve.models.families import FAMILIES
from serve.models.families.names import MtpNames
from tests.support.engine.checkpoints import (
    checkpoint,
    class_of,
    edit_json,
    find_variant,
    randomize,
    reference_model,
    settings_of,
)


def write_mtp(folder: Path, family: str, variant: str, seed: int = 0) -> Path:
    """Writes a copy of a checkpoint with an MTP layer behind the others, and the copies of
    embedding and head that published checkpoints have."""
    source = checkpoint(family, variant)
    path = Path(shutil.copytree(source, folder / f"mtp-{family}-{variant}-{seed}"))
    tensors = load_file(path / "model.safetensors")
    more = _longer_model(family, variant, seed)
    number = more.config.num_hidden_layers - 1
    at, size = f"model.layers.{number}.", more.config.hidden_size
    names = names_of(family, number)
    block = {k: v for k, v in more.state_dict().items() if k.startswith(at)}
    tensors |= {k.replace(at, names.block or at): v for k, v in block.items()}
    generator = torch.Generator().manual_seed(seed)
    for name in (names.embed_norm, names.state_norm, names.final_norm):
        tensors[f"{names.at}{name}.weight"] = 1 + 0.3 * torch.randn(size, generator=generator)
    join = torch.randn(size, 2 * size, generator=generator)
    tensors[f"{names.at}{names.join}.weight"] = join * size**-0.5
    if names.block is None:
        tensors[f"{at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors[f"{at}shared_head.head.weight"] = tensors["lm_head.weight"]
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", lambda values: values.update({names.key: 1}))
    return path


def names_of(family: str, number: int) -> MtpNames:
    """Returns the names of the family's MTP layer, behind `number` others."""
    names = FAMILIES[family].mtp
    assert names is not None
    return replace(names, at=names.at or f"model.layers.{number}.")


def _longer_model(family: str, variant: str, seed: int) -> Any:
    """Returns a model with one layer more than the variant."""
    settings = dict(settings_of(find_variant(family, variant)))
    model_class = class_of(family, settings)
    config = model_class.config_class(**settings)
    more: dict[str, Any] = {"num_hidden_layers": config.num_hidden_layers + 1}
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        more["layer_types"] = [*config.layer_types, "full_attention"]
    config = model_class.config_class(**settings | more)
    model = model_class(config).float().eval()
    randomize(model, seed + 77)
    return model


class MtpReference:
    """An MTP layer computed by Transformers' layer and plain torch. Its rows are computed anew at
    each call."""

    def __init__(self, path: Path, family: str, variant: str, seed: int = 0) -> None:
        self.model = reference_model(path)
        longer = _longer_model(family, variant, seed)
        number = longer.config.num_hidden_layers - 1
        self.layer, self.rotary = longer.model.layers[number], longer.model.rotary_emb
        tensors = load_file(path / "model.safetensors")
        self.names = names = names_of(family, number)
        at = str(names.at)
        self.own = {k.removeprefix(at): v for k, v in tensors.items() if k.startswith(at)}
        self.eps = longer.config.rms_norm_eps
        self.offset = 1.0 if names.block is not None else 0.0  # Qwen's norms

    def states(self, ids: list[int]) -> Tensor:
        """Returns what the layer reads for tokens, [T, hidden]."""
        result: Tensor = self.model.model(torch.tensor([ids])).last_hidden_state[0]
        return result

    @torch.no_grad()
    def forward(self, next_ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (states, logits) of rows from position 0 on."""
        embedded = self.model.model.embed_tokens(torch.tensor(next_ids))
        names = self.names
        parts = self._norm(embedded, names.embed_norm), self._norm(states, names.state_norm)
        x = (torch.cat(parts, dim=1) @ self.own[f"{names.join}.weight"].T)[None]
        positions = torch.arange(len(next_ids))[None]
        out = self.layer(x, position_embeddings=self.rotary(x, positions))
        out = out[0] if isinstance(out, tuple) else out
        states = self._norm(out[0], names.final_norm)
        return states, self.model.lm_head(states)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * scale * (self.own[f"{name}.weight"] + self.offset)


def draft_of(reference: Any, ids: list[int], depth: int, begin: int = 0) -> list[int]:
    """Returns the tokens that a head drafts greedily behind ids, of which it has seen those from
    position `begin` on. Positions are relative in RoPE, so that these may count from 0."""
    with torch.no_grad():
        states, next_ids = reference.states(ids)[begin : len(ids) - 1], ids[begin + 1 :]
    draft: list[int] = []
    for _ in range(depth):
        own, logits = reference.forward(next_ids, states)
        draft.append(int(logits[-1].argmax()))
        states, next_ids = torch.cat((states, own[-1:])), [*next_ids, draft[-1]]
    return draft


EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "draft_vocab_size": 120,
}


def write_eagle3(
    path: Path, target: Path, seed: int = 0, *, as_speculators: bool = False, **changes: Any
) -> Path:
    """Writes a random EAGLE-3 head of a checkpoint. as_speculators: in that library's layout.
    changes: of config.json."""
    model = json.loads((target / "config.json").read_text())
    sizes = {key: model[key] for key in ("hidden_size", "vocab_size")}
    config = EAGLE | {"head_dim": 16} | sizes | changes
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 1.6 * shape[-1] ** -0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    size, read = config["hidden_size"], model["hidden_size"]
    q, kv = (
        config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value")
    )
    inner = config["intermediate_size"]
    at = "layers.0." if as_speculators else "midlayer."
    count = len(config.get("eagle_aux_hidden_state_layer_ids", (0, 0, 0)))
    tensors = {
        "fc.weight": normal(size, count * read),
        f"{at}self_attn.q_proj.weight": normal(q, 2 * size),
        f"{at}self_attn.k_proj.weight": normal(kv, 2 * size),
        f"{at}self_attn.v_proj.weight": normal(kv, 2 * size),
        f"{at}self_attn.o_proj.weight": normal(size, q),
        f"{at}mlp.gate_proj.weight": normal(inner, size),
        f"{at}mlp.up_proj.weight": normal(inner, size),
        f"{at}mlp.down_proj.weight": normal(size, inner),
        f"{at}input_layernorm.weight": norm(size),
        f"{at}hidden_norm.weight": norm(size),
        f"{at}post_attention_layernorm.weight": norm(size),
        "norm.weight": norm(size),
        "lm_head.weight": normal(config["draft_vocab_size"], size),
    }
    if config["draft_vocab_size"] != config["vocab_size"]:
        order = torch.randperm(config["vocab_size"], generator=generator)
        own = order[: config["draft_vocab_size"]].sort().values
        tensors["d2t"] = own - torch.arange(len(own))
        tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, own, 1)
    if as_speculators or size != read:
        tensors["embed_tokens.weight"] = normal(config["vocab_size"], size)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if as_speculators:
        inside = {k: config.pop(k) for k in list(config) if k in EAGLE or k in (*sizes, "head_dim")}
        inside.pop("architectures")
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": inside.pop("draft_vocab_size"),
            "transformer_layer_config": inside,
        }
    (path / "config.json").write_text(json.dumps(config))
    return path


class EagleReference:
    """An EAGLE-3 head in plain torch. Its rows are computed anew at each call."""

    def __init__(self, path: Path, target: Path, reads: tuple[int, ...], **changes: Any) -> None:
        """reads: the layers whose inputs it reads."""
        self.model, self.reads = reference_model(target), reads
        self.own = load_file(path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        inner = config.get("transformer_layer_config", config)
        self.heads, self.kv_heads = inner["num_attention_heads"], inner["num_key_value_heads"]
        self.dim, self.eps, self.theta = (
            inner["head_dim"],
            inner["rms_norm_eps"],
            inner["rope_theta"],
        )
        self.is_residual_normed = config.get("norm_before_residual", False)
        self.vocab_size = inner["vocab_size"]
        at = "layers.0." if "layers.0.hidden_norm.weight" in self.own else "midlayer."
        self.own |= {k.removeprefix(at): v for k, v in self.own.items() if k.startswith(at)}

    def states(self, ids: list[int]) -> Tensor:
        found = self.model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([found[at][0] for at in self.reads], dim=1) @ self.own["fc.weight"].T

    @torch.no_grad()
    def forward(self, next_ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (states, logits) of rows from position 0 on."""
        table = self.own.get("embed_tokens.weight")
        if table is None:
            table = self.model.model.embed_tokens.weight
        rows = len(next_ids)
        normed = self._norm(states, "hidden_norm")
        x = torch.cat((self._norm(table[next_ids], "input_layernorm"), normed), dim=1)
        q, k, v = (self._product(x, f"self_attn.{name}_proj") for name in "qkv")
        q = self._turned(q.view(rows, self.heads, self.dim))
        k = self._turned(k.view(rows, self.kv_heads, self.dim))
        repeat = self.heads // self.kv_heads
        k = k.repeat_interleave(repeat, 1).transpose(0, 1)
        v = v.view(rows, self.kv_heads, self.dim).repeat_interleave(repeat, 1).transpose(0, 1)
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * self.dim**-0.5
        future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        attended = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        attended = attended.transpose(0, 1).flatten(1)
        x = (normed if self.is_residual_normed else states) + self._product(
            attended, "self_attn.o_proj"
        )
        inner = self._norm(x, "post_attention_layernorm")
        gate = torch.nn.functional.silu(self._product(inner, "mlp.gate_proj"))
        x = x + self._product(gate * self._product(inner, "mlp.up_proj"), "mlp.down_proj")
        own = self._product(self._norm(x, "norm"), "lm_head")
        if "d2t" not in self.own:
            return x, own
        logits = torch.full((rows, self.vocab_size), -torch.inf)
        return x, logits.index_copy(1, torch.arange(own.shape[1]) + self.own["d2t"], own)

    def _product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.own[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * scale * self.own[f"{name}.weight"]

    def _turned(self, x: Tensor) -> Tensor:
        half = self.dim // 2
        angles = torch.arange(len(x))[:, None] * self.theta ** -(torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
