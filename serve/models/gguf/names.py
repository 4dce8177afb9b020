"""The names of a GGUF model's tensors in a Hugging Face checkpoint, and what was done to them.

llama.cpp has one name for each part of a layer, whichever the architecture; the family's
WeightNames has the name that the loader asks for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass

from serve.errors import ModelLoadError
from serve.models.families import FAMILIES
from serve.models.families.names import ExpertNames, WeightNames
from serve.models.gguf.architecture import JOINED_QKV, QKV, Architecture
from serve.models.gguf.keys import Keys
from serve.models.gguf.reader import GGUFTensor
from serve.models.gguf.rope import ROPE_TENSORS

logger = logging.getLogger(__name__)

MAX_ALL_EXPERTS = 1 << 17
# tensors of a layer -> fields of WeightNames; a field's number is its place in a tuple
_MODULES = {
    "attn_norm": "attn_in",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_output": "o",
    "post_attention_norm": "attn_out",
    "ffn_norm": "mlp_in",
    "post_ffw_norm": "mlp_out",
    "ffn_down": "down",
}
_LATENT = {  # -> fields of LatentNames
    "attn_q": "q",
    "attn_q_a": "q_down",
    "attn_q_a_norm": "q_norm",
    "attn_q_b": "q_up",
    "attn_kv_a_mqa": "kv_down",
    "attn_kv_a_norm": "kv_norm",
    "attn_kv_b": "kv_up",
}
_SHARED = {"ffn_gate_shexp": 0, "ffn_up_shexp": 1}
_HALVES = {"gate": 0, "up": 1}  # of ffn_gate_up_exps
_LAYER = re.compile(r"blk\.(\d+)\.")
_OTHER_MODALITIES = ("v.", "a.", "mm.")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor of the checkpoint comes from.

    stored: the name of the GGUF tensor. expert: the part of its first dimension; None: all of it.
    rows: those that are taken of the rest, where it holds several products; None: all. heads: its
    rows are those of so many heads in the order of an interleaved rotary embedding; 0: in their own
    order. offset: what the conversion has added. is_row: it is a matrix of one row that may be
    stored as a vector. is_transposed: the loader asks for [in, out], unless it is quantized.
    values: the tensor with the rest of the rows of each head, if the stored one has only those of
    keys, transposed.
    """

    stored: str
    expert: int | None = None
    rows: slice | None = None
    heads: int = 0
    offset: float = 0.0
    is_row: bool = False
    is_transposed: bool = False
    values: str = ""


def tensor_sources(keys: Keys, architecture: Architecture, model_type: str) -> dict[str, Source]:
    """Returns the source of each tensor that a model of the family may have, by the name that the
    loader asks for. ModelLoadError for a tensor of the file that it has no use for."""
    names = FAMILIES[model_type].names
    found: dict[str, Source] = {}
    unused = set(architecture.unused(keys))
    for name, source in _Walk(keys, architecture, names).all():
        if source.stored in unused:
            continue
        # families have norms in different places, so that one name may have two candidates
        if name not in found or found[name].stored not in keys.tensors:
            found[name] = source
    table, head = f"{names.prefixes[0]}{names.embed}.weight", f"{names.heads[0]}.weight"
    if head in found and "output.weight" not in keys.tensors:
        # a tied head is looked up and multiplied with; only plain tables are both at once
        del found[head]
        if not is_plain(keys, "token_embd.weight"):
            found[head] = found[table]
    known = {source.stored for source in found.values()} | unused
    _check_all_known(keys, known | {source.values for source in found.values()})
    return found


def is_plain(keys: Keys, stored: str) -> bool:
    entry = keys.tensors.get(stored)
    return entry is None or entry.dtype in ("F32", "F16", "BF16")


class _Walk:
    """Yields names and sources of all tensors, those of experts one by one."""

    def __init__(self, keys: Keys, architecture: Architecture, names: WeightNames) -> None:
        self._names = names
        self._more = architecture.tensors
        self._offset = architecture.norm_offset
        self._num_layers = keys.num_layers
        self._num_experts = keys.num_experts
        if self._num_layers * self._num_experts > MAX_ALL_EXPERTS:
            raise keys.fail("expert_count", f"is too large for {self._num_layers} layers")
        is_permuted = architecture.is_permuted
        self._heads = {
            "attn_q": keys.num_heads if is_permuted else 0,
            "attn_k": keys.num_kv_heads if is_permuted else 0,
        }
        self._modules = {
            stem: getattr(names, architecture.modules.get(stem, attribute))
            for stem, attribute in _MODULES.items()
        } | _products(names)
        self._is_latent = architecture.is_latent
        self._tensors = keys.tensors
        if self._is_latent:
            latent = {stem: getattr(names.latent, part) for stem, part in _LATENT.items()}
            self._modules = self._modules | latent

    def all(self) -> Iterator[tuple[str, Source]]:
        names, prefix = self._names, self._names.prefixes[0]
        yield f"{prefix}{names.embed}.weight", Source("token_embd.weight")
        yield from self._module("output_norm", prefix + names.final_norm, "output_norm")
        yield f"{names.heads[0]}.weight", Source("output.weight")
        experts = next((way for way in names.experts if not way.is_fused), None)
        yield from self._further(prefix)
        for layer in range(self._num_layers):
            at, stored = prefix + names.layer.format(layer), f"blk.{layer}."
            for stem, module in self._modules.items():
                if not module:  # the family has none
                    continue
                yield from self._module(stored + stem, at + module, stem)
            if f"{stored}{JOINED_QKV}.weight" in self._tensors and len(names.qkv) == 3:
                yield from self._joined(at, stored)
            if self._is_latent and f"{stored}attn_kv_b.weight" not in self._tensors:
                both = Source(f"{stored}attn_k_b.weight", values=f"{stored}attn_v_b.weight")
                yield f"{at}{names.latent.kv_up}.weight", both
            yield at + names.sinks, Source(f"{stored}attn_sinks.weight")
            if self._num_experts and experts is not None:
                yield from self._mixture(experts, at, stored)

    def _module(self, stored: str, module: str, stem: str) -> Iterator[tuple[str, Source]]:
        offset = self._offset if stem.endswith("norm") else 0.0
        heads = self._heads.get(stem, 0)
        turned = self._names.is_transposed and not stem.endswith("norm")
        weight = Source(f"{stored}.weight", heads=heads, offset=offset, is_transposed=turned)
        yield f"{module}.weight", weight
        yield f"{module}.bias", Source(f"{stored}.bias", heads=heads)

    def _further(self, prefix: str) -> Iterator[tuple[str, Source]]:
        """Yields what only this architecture has."""
        for stored, name in self._more.items():
            for layer in range(self._num_layers if "{}" in stored else 1):
                yield prefix + name.format(layer), Source(stored.format(layer))

    def _joined(self, at: str, stored: str) -> Iterator[tuple[str, Source]]:
        """Yields q, k and v of one tensor, which a file may have of any architecture. There are as
        many rows of q as inputs of the product behind the attention."""
        num_rows = (self._tensors[f"{stored}{JOINED_QKV}.weight"].shape or (0,))[0]
        output = self._tensors.get(f"{stored}attn_output.weight")
        q_end = output.shape[-1] if output is not None and output.shape else 0
        k_end = q_end + max(0, num_rows - q_end) // 2
        parts = (slice(q_end), slice(q_end, k_end), slice(k_end, num_rows))
        for stem, module, rows in zip(QKV, self._names.qkv, parts, strict=True):
            heads = self._heads.get(stem, 0)
            for ending in ("weight", "bias"):
                source = Source(f"{stored}{JOINED_QKV}.{ending}", rows=rows, heads=heads)
                yield f"{at}{module}.{ending}", source

    def _mixture(self, names: ExpertNames, at: str, stored: str) -> Iterator[tuple[str, Source]]:
        yield f"{at}{names.router}.weight", Source(f"{stored}ffn_gate_inp.weight")
        yield f"{at}{names.router}.bias", Source(f"{stored}ffn_gate_inp.bias")
        is_row = names.is_correction_row
        yield at + names.correction, Source(f"{stored}exp_probs_b.bias", is_row=is_row)
        gate = Source(f"{stored}ffn_gate_inp_shexp.weight", is_row=True)
        yield f"{at}{names.shared_gate}.weight", gate
        for stem, number in _SHARED.items():
            yield f"{at}{names.shared_up[number]}.weight", Source(f"{stored}{stem}.weight")
        yield f"{at}{names.shared_down}.weight", Source(f"{stored}ffn_down_shexp.weight")
        modules = {"gate": names.up[0], "up": names.up[-1], "down": names.down}
        for part, module in modules.items():
            for ending in ("weight", "bias"):
                source = f"{stored}ffn_{part}_exps.{ending}"
                rows = None
                fused = self._tensors.get(f"{stored}ffn_gate_up_exps.{ending}")
                if fused is not None and part in _HALVES:
                    source, size = f"{stored}ffn_gate_up_exps.{ending}", _num_rows(fused, ending)
                    rows = slice(_HALVES[part] * size // 2, (_HALVES[part] + 1) * size // 2)
                for expert in range(self._num_experts):
                    yield f"{at}{module.format(expert)}.{ending}", Source(source, expert, rows)


def _products(names: WeightNames) -> dict[str, str]:
    """Returns the products of which some families store several in one tensor."""
    qkv = QKV if len(names.qkv) == 3 else (JOINED_QKV,)
    up = ("ffn_gate", "ffn_up") if len(names.up) == 2 else ("ffn_up",)
    return dict(zip(qkv + up, names.qkv + names.up, strict=True))


def _num_rows(tensor: GGUFTensor, ending: str) -> int:
    """Returns the outputs of a product of each expert, by its weight or its bias."""
    dimensions = tensor.shape[:-1] if ending == "weight" else tensor.shape
    return dimensions[-1] if dimensions else 0


def _check_all_known(keys: Keys, known: set[str]) -> None:
    """Raises ModelLoadError for a tensor of the layers that has no name here. Those of other
    modalities and of layers that predict further tokens are named in the log."""
    ignored, further = [], range(keys.num_layers, keys.num_blocks)
    for name in keys.tensors:
        if name in known or name in ROPE_TENSORS:
            continue
        layer = _LAYER.match(name)
        is_further = layer is not None and int(layer[1]) in further
        if not (is_further or name.startswith(_OTHER_MODALITIES)):
            raise ModelLoadError(
                f"{keys.source}: tensor {name:.80} is not known for architecture "
                f"{keys.architecture}"
            )
        ignored.append(name)
    if ignored:
        logger.info(
            "%d tensors of %s are not used, such as %s", len(ignored), keys.source, ignored[0]
        )
