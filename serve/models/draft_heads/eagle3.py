"""Loads EAGLE-3 heads (Li et al., arXiv 2503.01840): checkpoints of their own, beside a model.

Two layouts of config.json are known: that of the authors and of SGLang (a Llama configuration with
draft_vocab_size; in eagle_config the layers whose outputs the head reads), and that of the
speculators library (the block in transformer_layer_config, the layers whose inputs it reads).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ops.backend import Fusion
from serve.checkpoint_json import ConfigReader, read_json
from serve.errors import ModelLoadError
from serve.models.assemble import Assembler, Stored
from serve.models.checkpoint import Checkpoint
from serve.models.decoder import Decoder
from serve.models.families import FAMILIES
from serve.models.families.fields import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from serve.models.families.head_spec import EAGLE3, HeadSpec
from serve.models.layers.draft_head import DraftHead, HeadWeights
from serve.models.layers.rope import RotaryTable
from serve.models.loaded_tensors import LoadedTensors
from serve.models.open_checkpoint import open_checkpoint
from serve.models.parts import Part
from serve.models.random_checkpoint import RandomCheckpoint
from serve.models.spec import ModelSpec
from serve.models.tensors import ExpectedTensors, TensorSource
from serve.models.weights import CheckedNames

_PREFIXES = ("midlayer.", "layers.0.", "model.midlayer.", "model.layers.0.")
_EMBED, _OFFSETS = "embed_tokens.weight", "d2t"
_READS = "eagle_aux_hidden_state_layer_ids"
# what newer heads may do otherwise
_UNKNOWN = ("norm_before_fc", "fc_norm", "norm_output")


def read_eagle3(path: Path, target: ModelSpec) -> tuple[HeadSpec, ModelSpec]:
    """Returns a head and the specification of its block. target: the model's. ModelLoadError for
    another kind of checkpoint, and for a head of another model."""
    whole = ConfigReader(read_json(path / "config.json"), str(path / "config.json"))
    if not is_eagle3(whole):
        raise whole.fail("architectures", "does not name an EAGLE-3 head")
    for key in _UNKNOWN:
        if whole.boolean(key, False):
            raise whole.fail(key, "is not supported")
    inner, config = whole.values.get("transformer_layer_config"), whole
    if inner is not None:
        if not isinstance(inner, dict):
            raise whole.fail("transformer_layer_config", "must be an object")
        config = ConfigReader(inner, f"{whole.source}: transformer_layer_config")
    if config.text("model_type", "llama") != "llama":
        raise config.fail("model_type", "is not supported; known: llama")
    if config.integer("num_hidden_layers", 1, high=MAX_LAYERS) != 1:
        raise config.fail("num_hidden_layers", "must be 1")
    values = config.values | {"num_hidden_layers": 1}
    family = FAMILIES["llama"]
    block = ModelSpec(
        model_type="llama",
        torch_dtype="float32",
        **family.fields(ConfigReader(values, config.source)),
    )
    size = whole.integer("target_hidden_size", target.hidden_size, high=MAX_WIDTH)
    if size != target.hidden_size:
        raise whole.fail(
            "target_hidden_size",
            f"is {size}, but the model's hidden_size is {target.hidden_size}: it is another's head",
        )
    if block.vocab_size != target.vocab_size:
        raise config.fail(
            "vocab_size",
            f"is {block.vocab_size}, but the model's is {target.vocab_size}: it is another's head",
        )
    head = HeadSpec(
        kind=EAGLE3,
        layer=replace(block.layers[0], norms=frozenset({"mlp_in"})),
        hidden_size=block.hidden_size,
        vocab_size=whole.integer("draft_vocab_size", target.vocab_size, high=MAX_VOCAB),
        reads=_reads(whole, target.num_layers),
        is_residual_normed=whole.boolean("norm_before_residual", False),
    )
    return head, block


def is_eagle3(config: ConfigReader) -> bool:
    names = config.values.get("architectures")
    is_named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return is_named or config.values.get("speculators_model_type") == "eagle3"


def _reads(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose inputs a head reads. By default they are those of the authors."""
    own = config.values.get("eagle_config")
    found, shift = config.values.get(_READS), 0
    if isinstance(own, dict) and own.get(_READS) is not None:
        found, shift = own[_READS], 1
    if found is None:
        found = [2, num_layers // 2, num_layers - 3]
    if not (
        isinstance(found, list) and 1 <= len(found) <= 16 and _are_layers(found, shift, num_layers)
    ):
        raise config.fail(_READS, f"must list layers of the model, which has {num_layers}")
    return tuple(each + shift for each in found)


def _are_layers(values: list[object], shift: int, num_layers: int) -> bool:
    return all(type(value) is int and 0 <= value + shift <= num_layers for value in values)


def load_eagle3(
    path: Path,
    head: HeadSpec,
    block: ModelSpec,
    target: Decoder,
    make_tensors: Callable[[Checkpoint], LoadedTensors],
    *,
    is_random: bool = False,
) -> DraftHead:
    """Loads what read_eagle3 has read, to stand beside `target`. make_tensors: makes the source of
    the tensors, with the target's precision. is_random: random weights, for measurements."""
    device = target.device
    checkpoint = RandomCheckpoint(path, device) if is_random else open_checkpoint(path, block)
    at = _PREFIXES[0] if is_random else _find_block(checkpoint)
    # a head as wide as the model may share the model's embedding
    has_embedding = head.hidden_size != target.spec.hidden_size or _EMBED in checkpoint.entries
    build = partial(_assemble, head, block, target, at, has_embedding)
    expected = ExpectedTensors(checkpoint, None)
    build(expected)
    checkpoint.expect(expected.shapes)
    expected.ignored |= {_OFFSETS, "t2d"}
    if not is_random:
        names = FAMILIES["llama"].names
        CheckedNames(block, names, Stored("", "lm_head"), checkpoint, expected).check()
    weights = build(make_tensors(checkpoint))
    if head.vocab_size != target.spec.vocab_size:
        ids = _token_ids(checkpoint, head, target.spec.vocab_size, is_random)
        weights.token_ids = ids.to(device)
    checkpoint.release()
    rotary = [RotaryTable(rope, target.max_model_len, device) for rope in block.ropes]
    return DraftHead(head, weights, target, rotary)


def _find_block(checkpoint: Checkpoint) -> str:
    """Returns the prefix of the block's tensors."""
    for prefix in _PREFIXES:
        if f"{prefix}hidden_norm.weight" in checkpoint.entries:
            return prefix
    raise ModelLoadError(
        f"{checkpoint.path}: tensor {_PREFIXES[0]}hidden_norm.weight is missing; an EAGLE-3 head"
        " has it"
    )


def _assemble(
    head: HeadSpec,
    block: ModelSpec,
    target: Decoder,
    at: str,
    has_embedding: bool,
    source: TensorSource,
) -> HeadWeights:
    """Builds the head from its tensors; `at` begins the names of the block's."""
    size = head.hidden_size
    names, stored = FAMILIES["llama"].names, Stored("", "lm_head")
    parts = Assembler(block, names, stored, source, target.backend, q_first=False)
    joined = len(head.reads) * target.spec.hidden_size
    return HeadWeights(
        block=parts.block(head.layer, at, num_in=2 * size),
        join=source.product([Part("fc", size)], joined),
        embed_norm=parts.norm(f"{at}input_layernorm"),
        state_norm=parts.norm(f"{at}hidden_norm"),
        head=source.product(
            [Part("lm_head", head.vocab_size)],
            size,
            fusion=Fusion(parts.norm("norm")),
            is_head=True,
        ),
        embed=source.table(_EMBED, (block.vocab_size, size)) if has_embedding else None,
    )


def _token_ids(checkpoint: Checkpoint, head: HeadSpec, vocab_size: int, is_random: bool) -> Tensor:
    """Returns the model's token of each of the head's, [vocab] int64: its number plus d2t."""
    own = torch.arange(head.vocab_size)
    if is_random:
        return own
    entry = checkpoint.entries.get(_OFFSETS)
    if entry is None:
        raise ModelLoadError(f"{checkpoint.path}: tensor {_OFFSETS} is missing")
    if entry.shape != (head.vocab_size,) or entry.dtype not in ("I64", "I32"):
        raise ModelLoadError(
            f"{entry.file}: tensor {_OFFSETS} must be {head.vocab_size} whole numbers, not"
            f" {list(entry.shape)} of type {entry.dtype}"
        )
    ids = own + checkpoint.fetch(_OFFSETS).to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) < len(ids):
        raise ModelLoadError(
            f"{entry.file}: tensor {_OFFSETS} must give each token another one below {vocab_size}"
        )
    return ids
