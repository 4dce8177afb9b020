"""Builds a Decoder from a checkpoint: checks, concatenation of parts, streaming.

Presence and shape of all tensors are checked against the spec before the first is read. Then one
product at a time is fetched, cast, concatenated and packed, so that at most one unpacked product is
in memory.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ops.backend import Backend, Fusion, LinearOp
from ops.reference import ReferenceBackend
from quant.formats.base import KV_SCALES, joined
from quant.formats.weights import ROUNDED
from serve.errors import ModelLoadError
from serve.models.assemble import Assembler, Stored
from serve.models.checkpoint import FLOATS, Checkpoint, check_rule
from serve.models.decoder import Decoder, DecoderWeights
from serve.models.families import FAMILIES
from serve.models.families.head_spec import HeadSpec
from serve.models.families.layer_spec import MixtureSpec, MlpSpec
from serve.models.families.names import WeightNames
from serve.models.loaded_tensors import LoadedTensors, TensorCache
from serve.models.open_checkpoint import open_checkpoint
from serve.models.packed import PackedProducts
from serve.models.progress import LoadProgress
from serve.models.random_checkpoint import RandomCheckpoint
from serve.models.shard import WHOLE, Shard
from serve.models.spec import ModelSpec, read_spec
from serve.models.tensors import ExpectedTensors, MakeLinear, ParameterCounts, TensorSource

logger = logging.getLogger(__name__)


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    backend: Backend,
    make_linear: MakeLinear | None = None,
    make_head: MakeLinear | None = None,
    keep_weight_dtype: bool = False,
    unpack: bool = False,
    q_first: bool = False,
    is_random: bool = False,
    max_model_len: int | None = None,
    progress: LoadProgress | None = None,
    shard: Shard = WHOLE,
    packed_cache: TensorCache | None = None,
    make_tensors: Callable[..., LoadedTensors] = LoadedTensors,
    draft_head: HeadSpec | None = None,
) -> Decoder:
    """Loads a Hugging Face directory, or a shard of it, as a decoder that computes in `dtype`.

    make_linear packs each product (default: the backend's), make_head the last one (default:
    make_linear), from parts [out_i, in] in `dtype`, or in the file's type with keep_weight_dtype.
    Quantized products of the checkpoint are used as they are, which needs quantized products of the
    back end; with `unpack` they become plain weights. With q_first q has a product of its own that
    runs before k and v, which is slower but lets memory nodes start earlier. is_random: random
    weights made on the device, for measurements; only config.json is read. max_model_len: the
    longest context that is served, which decides LongRoPE's factors; None: the model's.
    packed_cache: keeps packed weights between starts; its settings say how make_linear packs.
    make_tensors: makes the source of the tensors. draft_head: an MTP layer that is loaded, too.
    ModelLoadError says what is wrong with the checkpoint.
    """
    spec = replace(read_spec(path), draft_head=draft_head)
    family = FAMILIES[spec.model_type]
    names = family.names
    checkpoint = _open(path, spec, backend, is_random)
    stored = _find(spec, names, checkpoint)
    is_transposed = names.is_transposed
    expected = ExpectedTensors(checkpoint, spec.packed, is_transposed=is_transposed)
    Assembler(spec, names, stored, expected, backend, q_first=q_first, mtp=family.mtp).decoder(
        range(spec.num_layers)
    )
    checkpoint.expect(expected.shapes)
    checked = CheckedNames(spec, names, stored, checkpoint, expected)
    checked.check()
    if not unpack:
        checked.log_losses(is_int8=make_linear is not None)
    make_linear = make_linear or joining(backend.pack_linear)
    loaded = make_tensors(
        checkpoint,
        spec.packed,
        backend,
        dtype,
        make_linear,
        make_head or make_linear,
        weight_dtype=None if keep_weight_dtype else dtype,
        unpack=unpack,
        is_transposed=is_transposed,
    )

    def build(source: TensorSource) -> DecoderWeights:
        layers = (progress or LoadProgress()).layers(spec, shard.numbers(spec.num_layers))
        assembler = Assembler(
            spec, names, stored, source, backend, q_first=q_first, shard=shard, mtp=family.mtp
        )
        return assembler.decoder(layers)

    if packed_cache is None:
        weights = build(loaded)
    else:
        part = f"{shard.rank} of {shard.size}, layers {shard.numbers(spec.num_layers)}"
        settings = f"{dtype} {keep_weight_dtype} {unpack} {q_first} {part}"
        if draft_head is not None:
            settings += f", {draft_head.kind}"
        weights = packed_cache.build(checkpoint, loaded, settings, build)
    checkpoint.release()
    if loaded.num_ungrouped and backend.quantized is not None:
        logger.warning(
            "the experts of %d layers are computed one by one, which is slow: their products have "
            "reordered inputs (desc_act) or several formats, or the device has no kernel for them",
            loaded.num_ungrouped,
        )
    return Decoder(
        shard.spec(spec),
        weights,
        backend,
        dtype,
        backend.device,
        max_model_len,
        first_layer=shard.numbers(spec.num_layers).start,
        is_sharded=shard.size > 1,
    )


def _open(
    path: Path, spec: ModelSpec, backend: Backend, is_random: bool
) -> Checkpoint | RandomCheckpoint:
    return RandomCheckpoint(path, backend.device) if is_random else open_checkpoint(path, spec)


def load_embedding(path: Path, backend: Backend, *, is_random: bool = False) -> Tensor:
    """Returns the whole table of embeddings of a model, [vocab, hidden], with their scale."""
    spec = read_spec(path)
    names = FAMILIES[spec.model_type].names
    checkpoint = _open(path, spec, backend, is_random)
    name = f"{_find(spec, names, checkpoint).prefix}{names.embed}.weight"
    checkpoint.expect({name: (spec.vocab_size, spec.embed_size)})
    table = checkpoint.fetch(name).to(backend.device, copy=True)
    checkpoint.release()
    return table if spec.embed_scale == 1.0 else table * spec.embed_scale


def expect_tensors(
    spec: ModelSpec, checkpoint: Checkpoint | None = None, *, has_superblocks: bool = True
) -> ExpectedTensors:
    """Returns the tensors that the model needs of a checkpoint, which is not checked; without one,
    those of a checkpoint that is not quantized. has_superblocks: as `ExpectedTensors` has it."""
    family = FAMILIES[spec.model_type]
    names = family.names
    if checkpoint is None:
        stored = Stored(names.prefixes[0], None if spec.is_tied else names.heads[0])
    else:
        stored = _find(spec, names, checkpoint)
    expected = ExpectedTensors(
        checkpoint,
        spec.packed,
        is_transposed=names.is_transposed,
        has_superblocks=has_superblocks,
    )
    backend = ReferenceBackend()
    Assembler(spec, names, stored, expected, backend, q_first=False, mtp=family.mtp).decoder(
        range(spec.num_layers)
    )
    return expected


def count_parameters(spec: ModelSpec) -> ParameterCounts:
    """Returns the numbers of weights and biases that a checkpoint of the model holds."""
    if spec.counts is not None:
        return spec.counts
    counts = expect_tensors(spec).counts
    counts.idle = sum(_idle_weights(spec, layer.mlp) for layer in spec.layers)
    return counts


def _idle_weights(spec: ModelSpec, mlp: MlpSpec | MixtureSpec | None) -> int:
    """Returns the weights of the experts of a layer that one row does not use."""
    if not isinstance(mlp, MixtureSpec):
        return 0
    return (mlp.num_experts - mlp.router.top_k) * mlp.expert.num_weights(
        mlp.latent_size or spec.hidden_size
    )


def _find(spec: ModelSpec, names: WeightNames, checkpoint: Checkpoint) -> Stored:
    """Returns where the checkpoint keeps the model."""
    return Stored(
        checkpoint.find_prefix(names.prefixes, f"{names.embed}.weight"),
        _find_head(spec, names, checkpoint),
    )


def _find_head(spec: ModelSpec, names: WeightNames, checkpoint: Checkpoint) -> str | None:
    """Returns the head's module, None for the embedding; as in Transformers, a tied model uses its
    own head if there is one."""
    for head in names.heads:
        if PackedProducts(spec.packed, checkpoint).has_weight(head):
            return head
    return None if spec.is_tied else names.heads[0]


def joining(pack: Callable[[Tensor, Tensor | None, Fusion], LinearOp]) -> MakeLinear:
    """Returns a MakeLinear that concatenates the parts and calls pack."""
    return lambda parts, bias, fusion: pack(joined(parts), bias, fusion)


class CheckedNames:
    """Compares a checkpoint's tensors with those that a model needs."""

    def __init__(
        self,
        spec: ModelSpec,
        names: WeightNames,
        stored: Stored,
        checkpoint: Checkpoint,
        expected: ExpectedTensors,
    ) -> None:
        self._spec = spec
        self._names = names
        self._checkpoint = checkpoint
        self._expected = expected
        embed = f"{stored.prefix}{names.embed}"
        self._vocab_names = {f"{module}.weight" for module in (embed, stored.head or embed)}

    def check(self) -> None:
        """Raises ModelLoadError unless every needed tensor exists with the right shape."""
        checkpoint, packed_rules = self._checkpoint, self._expected.packed_rules
        for name, shape in self._expected.shapes.items():
            entry, stored = checkpoint.entries.get(name), checkpoint.stored_name(name)
            if entry is None:
                raise ModelLoadError(
                    f"{checkpoint.path}: tensor {stored}{self._or_packed(name)} is missing"
                )
            if entry.shape != shape:
                hint = self._hint(name, entry.shape)
                raise ModelLoadError(
                    f"{entry.file}: tensor {stored} has shape {list(entry.shape)}, but "
                    f"{checkpoint.described_by} asks for {list(shape)}{hint}"
                )
            if entry.dtype not in FLOATS:
                raise ModelLoadError(
                    f"{entry.file}: tensor {stored} has type {entry.dtype}; "
                    f"only {', '.join(FLOATS)} can be loaded"
                )
        for name, rule in packed_rules.items():
            check_rule(checkpoint, name, rule)
        self._check_others()

    def log_losses(self, *, is_int8: bool) -> None:
        """Says what the weights of a quantized checkpoint lose by what the kernels compute with.
        is_int8: its plain products become int8."""
        if self._spec.packed is None:
            return
        expected, losses = self._expected, sorted(self._expected.losses)
        if is_int8 and expected.plain:
            losses.append(
                f"plain products ({len(expected.plain)}) {ROUNDED}; dtype bfloat16 avoids that, "
                "and unpacks the others"
            )
        for loss in losses:
            logger.warning("the checkpoint's %s", loss)
        if expected.mixed:
            logger.warning(
                "products whose parts have different formats (%d, such as %s) are computed part by "
                "part",
                len(expected.mixed),
                min(expected.mixed),
            )

    def _check_others(self) -> None:
        """Checks unused tensors. Those of the model's own modules must be zero, such as a bias or
        a zero point that some writers always store; others are named in the log."""
        expected = self._expected
        modules = expected.products | {
            name.rpartition(".")[0]
            for name in expected.shapes
            if name.endswith((".weight", ".bias"))
        }
        kv_scales = {n for n in self._checkpoint.entries if n.rpartition(".")[2] in KV_SCALES}
        if kv_scales:
            logger.info("%d scales of K/V are not used: see kv_dtype", len(kv_scales))
        endings = self._names.ignored
        if self._spec.draft_head is not None:  # copies of the model's own tables
            endings += ("shared_head.head.weight", f"{self._spec.num_layers}.embed_tokens.weight")
        unused = sorted(
            name
            for name in self._checkpoint.entries.keys() - kv_scales
            if name not in expected.shapes
            and name not in expected.packed_rules
            and name not in expected.ignored
            and not name.endswith(endings)
        )
        for name in [name for name in unused if _is_within(name, modules)]:
            if not self._checkpoint.is_zero(name):
                stored = self._checkpoint.stored_name(name)
                raise ModelLoadError(
                    f"{self._checkpoint.entries[name].file}: tensor {stored} is not zero, but this "
                    f"model has no use for it; {self._checkpoint.described_by} does not fit the "
                    "tensors"
                )
            unused.remove(name)
        if unused and self._checkpoint.is_strict:
            stored = self._checkpoint.stored_name(unused[0])
            raise ModelLoadError(
                f"{self._checkpoint.path}: tensor {stored} is there, but "
                f"{self._checkpoint.described_by} do not ask for it"
            )
        log_unused(unused, self._spec.num_layers)

    def _or_packed(self, name: str) -> str:
        """Returns the name of the quantized tensor that could replace a missing weight."""
        module, _, ending = name.rpartition(".")
        packed = self._spec.packed
        if packed is None or ending != "weight" or module not in self._expected.products:
            return ""
        return f" (or {module}.{packed.marker})"

    def _hint(self, name: str, shape: tuple[int, ...]) -> str:
        rows = shape[0] if shape else 0
        if name in self._vocab_names and rows != self._spec.vocab_size:
            return f" (vocab_size is {self._spec.vocab_size}, the table has {rows} rows)"
        return ""


def _is_within(name: str, modules: set[str]) -> bool:
    ends = (at for at, letter in enumerate(name) if letter == ".")
    return any(name[:end] in modules for end in ends)


_MTP = "multi-token prediction head"
# parts of tensors' names -> parts of multimodal models that are not served
TOWERS = {
    "vision_tower": "vision tower",
    "vision_model": "vision tower",
    "vision_encoder": "vision tower",
    "visual": "vision tower",
    "audio_tower": "audio tower",
    "embed_vision": "vision tower",
    "embed_audio": "audio tower",
    "multi_modal_projector": "projector",
    "mtp": _MTP,
}


def log_unused(names: Sequence[str], num_layers: int) -> None:
    """Says which parts of a model are not loaded: towers, further layers, other tensors."""
    towers: dict[str, int] = {}
    others = []
    for name in names:
        parts = name.split(".")
        tower = next((TOWERS[part] for part in parts if part in TOWERS), None)
        if tower is None and any(
            part == "layers" and after.isdigit() and int(after) >= num_layers
            for part, after in itertools.pairwise(parts)
        ):
            tower = _MTP
        if tower is None:
            others.append(name)
        else:
            towers[tower] = towers.get(tower, 0) + 1
    if towers:
        known = [tower for tower in dict.fromkeys(TOWERS.values()) if tower in towers]
        found = " and ".join(f"the {tower}" for tower in known)
        start = "" if known == [_MTP] else "text only: "
        verb = "is" if len(known) == 1 else "are"
        count = sum(towers.values())
        logger.info("%s%s %s not loaded (%d tensors)", start, found, verb, count)
    if others:
        logger.warning("%d tensors are not used, such as %s", len(others), others[0])
