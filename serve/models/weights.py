"""Builds a Decoder from a checkpoint: checks, concatenation of parts, streaming.

Presence and shape of all tensors are checked against the spec before the first is read. Then one
product at a time is fetched, cast, concatenated and packed, so that at most one unpacked product is
in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ops.backend import NO_FUSION, Backend, Fusion, LinearOp, Norm
from quant.checkpoint_formats import TensorRule
from serve.errors import ModelLoadError
from serve.models.checkpoint import FLOATS, Checkpoint, check_rule
from serve.models.decoder import Decoder, DecoderWeights, LayerWeights
from serve.models.families import FAMILIES
from serve.models.progress import LoadProgress
from serve.models.random_checkpoint import RandomCheckpoint
from serve.models.spec import ModelSpec, read_spec

logger = logging.getLogger(__name__)

MakeLinear = Callable[[Sequence[Tensor], Tensor | None, Fusion], LinearOp]
Shapes = dict[str, tuple[int, ...]]


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
    progress: LoadProgress | None = None,
) -> Decoder:
    """Loads a Hugging Face directory as a decoder that computes in `dtype`.

    make_linear packs each product (default: the backend's), make_head the last one (default:
    make_linear), from parts [out_i, in] in `dtype`, or in the file's type with keep_weight_dtype.
    Quantized products of the checkpoint are used as they are, which needs quantized products of the
    back end; with `unpack` they become plain weights. With q_first q has a product of its own that
    runs before k and v, which is slower but lets memory nodes start earlier. is_random: random
    weights made on the device, for measurements; only config.json is read. ModelLoadError says what
    is wrong with the checkpoint.
    """
    spec = read_spec(path)
    checkpoint = RandomCheckpoint(path, backend.device) if is_random else Checkpoint(path)
    loader = _Loader(
        spec,
        checkpoint,
        dtype,
        make_linear or joining(backend.pack_linear),
        backend,
        make_head=make_head,
        keep_weight_dtype=keep_weight_dtype,
        unpack=unpack,
        q_first=q_first,
    )
    loader.check()
    weights = loader.load(progress or LoadProgress())
    checkpoint.release()
    return Decoder(spec, weights, backend, dtype, loader.device)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates parts along the output; a single part is not copied."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))


def joining(pack: Callable[[Tensor, Tensor | None, Fusion], LinearOp]) -> MakeLinear:
    """Returns a MakeLinear that concatenates the parts and calls pack."""
    return lambda parts, bias, fusion: pack(join(parts), bias, fusion)


class _Loader:
    """Checks the tensors of one checkpoint and packs each product."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        make_linear: MakeLinear,
        backend: Backend,
        *,
        make_head: MakeLinear | None,
        keep_weight_dtype: bool,
        unpack: bool,
        q_first: bool,
    ) -> None:
        self.spec = spec
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.make_linear = make_linear
        self.make_head = make_head or make_linear
        self.device = backend.device
        self.linears = backend.quantized
        self.weight_dtype = None if keep_weight_dtype else dtype
        self.unpack = unpack
        self.q_first = q_first
        self.names = FAMILIES[spec.model_type].names
        self.prefix = checkpoint.find_prefix(self.names.prefixes, f"{self.names.embed}.weight")
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.qkv_sizes = _sizes_of_parts(self.names.qkv, [q_size, kv_size, kv_size])
        num_parts = 2 if spec.is_gated else 1
        self.up_sizes = _sizes_of_parts(self.names.up, [spec.intermediate_size] * num_parts)
        self.packed_rules: dict[str, TensorRule] = {}
        self.products: set[str] = set()
        self.modules: set[str] = set()  # modules of the model's tensors

    # -- checks

    def check(self) -> None:
        """Checks that every needed tensor exists with the right shape, and no other matters."""
        expected = self._expected()
        self.checkpoint.expect(expected)
        for name, shape in expected.items():
            entry = self.checkpoint.entries.get(name)
            if entry is None:
                raise ModelLoadError(
                    f"{self.checkpoint.path}: tensor {name}{self._or_packed(name)} is missing"
                )
            if entry.shape != shape:
                raise ModelLoadError(
                    f"{entry.file}: tensor {name} has shape {list(entry.shape)}, but config.json "
                    f"asks for {list(shape)}{self._hint(name, entry.shape)}"
                )
            if entry.dtype not in FLOATS:
                raise ModelLoadError(
                    f"{entry.file}: tensor {name} has type {entry.dtype}; "
                    f"only {', '.join(FLOATS)} can be loaded"
                )
        for name, rule in self.packed_rules.items():
            check_rule(self.checkpoint, name, rule)
        self._check_others(expected)

    def _check_others(self, expected: Shapes) -> None:
        """Checks unused tensors. Those of the model's own modules must be zero, such as a bias or
        a zero point that some writers always store; others are named in the log."""
        self.modules = self.products | {name.rpartition(".")[0] for name in expected}
        unused = sorted(
            name
            for name in self.checkpoint.entries
            if name not in expected
            and name not in self.packed_rules
            and not name.endswith(self.names.ignored)
        )
        for name in [name for name in unused if self._is_of_a_module(name)]:
            if not self.checkpoint.is_zero(name):
                raise ModelLoadError(
                    f"{self.checkpoint.entries[name].file}: tensor {name} is not zero, but this "
                    "model has no use for it; config.json does not fit the tensors"
                )
            unused.remove(name)
        if unused:
            logger.warning("%d tensors are not used, such as %s", len(unused), unused[0])

    def _or_packed(self, name: str) -> str:
        """Returns the name of the quantized tensor that could replace a missing weight."""
        module, _, ending = name.rpartition(".")
        packed = self.spec.packed
        if packed is None or ending != "weight" or module not in self.products:
            return ""
        return f" (or {module}.{packed.marker})"

    def _is_of_a_module(self, name: str) -> bool:
        ends = (at for at, letter in enumerate(name) if letter == ".")
        return any(name[:end] in self.modules for end in ends)

    def _hint(self, name: str, shape: tuple[int, ...]) -> str:
        rows = shape[0] if shape else 0
        is_vocab = name in (self._embed_name, self._head_name)
        if is_vocab and rows != self.spec.vocab_size:
            return f" (vocab_size is {self.spec.vocab_size}, the table has {rows} rows)"
        return ""

    def _expected(self) -> Shapes:
        spec, names, prefix = self.spec, self.names, self.prefix
        shapes: Shapes = {self._embed_name: (spec.vocab_size, spec.embed_size)}
        if spec.num_positions:
            shapes[f"{prefix}{names.positions}.weight"] = (spec.num_positions, spec.hidden_size)
        if spec.embed_size != spec.hidden_size:
            self._expect_linear(
                shapes, [prefix + names.project_in], [spec.hidden_size], spec.embed_size, False
            )
            self._expect_linear(
                shapes, [prefix + names.project_out], [spec.embed_size], spec.hidden_size, False
            )
        if spec.has_final_norm:
            self._expect_norm(shapes, prefix + names.final_norm)
        if not self._expect_packed([names.head], [spec.vocab_size], spec.embed_size):
            shapes[self._head_name] = (spec.vocab_size, spec.embed_size)
        for index in range(spec.num_layers):
            self._expect_layer(shapes, prefix + names.layer.format(index))
        return shapes

    def _expect_layer(self, shapes: Shapes, at: str) -> None:
        spec, names = self.spec, self.names
        hidden, inner = spec.hidden_size, spec.intermediate_size
        qkv, up = [at + part for part in names.qkv], [at + part for part in names.up]
        q_size = spec.num_heads * spec.head_dim
        self._expect_norm(shapes, at + names.attn_norm)
        self._expect_norm(shapes, at + names.mlp_norm)
        self._expect_linear(shapes, qkv, self.qkv_sizes, hidden, spec.has_qkv_bias)
        self._expect_linear(shapes, [at + names.o], [hidden], q_size, spec.has_o_bias)
        self._expect_linear(shapes, up, self.up_sizes, hidden, spec.has_mlp_bias)
        self._expect_linear(shapes, [at + names.down], [hidden], inner, spec.has_mlp_bias)
        if spec.has_qk_norm:
            shapes[f"{at}{names.q_norm}.weight"] = (spec.head_dim,)
            shapes[f"{at}{names.k_norm}.weight"] = (spec.head_dim,)

    def _expect_norm(self, shapes: Shapes, name: str) -> None:
        if self.spec.has_norm_weight:
            shapes[f"{name}.weight"] = (self.spec.hidden_size,)
        if self.spec.has_norm_bias:
            shapes[f"{name}.bias"] = (self.spec.hidden_size,)

    def _expect_linear(
        self, shapes: Shapes, parts: list[str], out_sizes: list[int], in_size: int, has_bias: bool
    ) -> None:
        is_packed = self._expect_packed(parts, out_sizes, in_size)
        for part, out_size in zip(parts, out_sizes, strict=True):
            shape = (in_size, out_size) if self.names.is_transposed else (out_size, in_size)
            if not is_packed:
                shapes[f"{part}.weight"] = shape
            if has_bias:
                shapes[f"{part}.bias"] = (out_size,)

    def _expect_packed(self, parts: list[str], out_sizes: list[int], in_size: int) -> bool:
        """Returns whether the checkpoint quantizes this product, and records its tensors if so."""
        packed = self.spec.packed
        self.products.update(parts)
        if packed is None or not self._is_packed(parts):
            return False
        for part, out_size in zip(parts, out_sizes, strict=True):
            try:
                rules = packed.tensors(in_size, out_size)
            except ValueError as error:
                raise ModelLoadError(f"{self.checkpoint.path}: {part}: {error}") from error
            self.packed_rules |= {f"{part}.{ending}": rule for ending, rule in rules.items()}
        return True

    def _is_packed(self, parts: list[str]) -> bool:
        packed = self.spec.packed
        if packed is None:
            return False
        has = [f"{part}.{packed.marker}" in self.checkpoint.entries for part in parts]
        if any(has) and not all(has):
            raise ModelLoadError(
                f"{self.checkpoint.path}: {parts[has.index(False)]} is not quantized, but "
                f"{parts[has.index(True)]} is; products that are computed together must be alike"
            )
        return all(has)

    # -- loading

    def load(self, progress: LoadProgress) -> DecoderWeights:
        spec, names, prefix = self.spec, self.names, self.prefix
        has_projections = spec.embed_size != spec.hidden_size
        final_norm = self._norm(prefix + names.final_norm) if spec.has_final_norm else None
        layers = [
            self._layer(prefix + names.layer.format(index)) for index in progress.layers(spec)
        ]
        return DecoderWeights(
            embed=self._table(self._embed_name),
            positions=self._table(f"{prefix}{names.positions}.weight")
            if spec.num_positions
            else None,
            project_in=self._linear([prefix + names.project_in], False)
            if has_projections
            else None,
            layers=layers,
            project_out=self._linear([prefix + names.project_out], False, Fusion(final_norm))
            if has_projections
            else None,
            head=self._head(None if has_projections else final_norm),
            final_norm=None if has_projections else final_norm,
        )

    def _layer(self, at: str) -> LayerWeights:
        spec, names = self.spec, self.names
        attn_norm, mlp_norm = self._norm(at + names.attn_norm), self._norm(at + names.mlp_norm)
        before_attn = before_mlp = None
        if not spec.is_post_norm:
            before_attn, before_mlp = attn_norm, mlp_norm
        q, qkv = self._qkv([at + part for part in names.qkv], Fusion(before_attn))
        up = [at + part for part in names.up]
        mlp = Fusion(before_mlp, spec.activation, spec.is_gated)
        layer = LayerWeights(
            q=q,
            qkv=qkv,
            q_norm=self._vector(f"{at}{names.q_norm}.weight") if spec.has_qk_norm else None,
            k_norm=self._vector(f"{at}{names.k_norm}.weight") if spec.has_qk_norm else None,
            o=self._linear([at + names.o], spec.has_o_bias),
            up=self._linear(up, spec.has_mlp_bias, mlp),
            down=self._linear([at + names.down], spec.has_mlp_bias),
            attn_norm=attn_norm if spec.is_post_norm else None,
            mlp_norm=mlp_norm if spec.is_post_norm else None,
        )
        self.checkpoint.release()
        return layer

    def _qkv(self, parts: list[str], fusion: Fusion) -> tuple[LinearOp | None, LinearOp]:
        """Returns (None, the product of q, k and v), or with q_first those of q and of k and v."""
        has_bias = self.spec.has_qkv_bias
        if not self.q_first:
            return None, self._linear(parts, has_bias, fusion)
        if len(parts) == 3:
            q, *kv = parts
            return self._linear([q], has_bias, fusion), self._linear(kv, has_bias, fusion)
        # stored as one tensor, which is never packed
        size = self.spec.num_heads * self.spec.head_dim
        (weight,) = self._parts([f"{parts[0]}.weight"])
        bias = self._parts([f"{parts[0]}.bias"])[0] if has_bias else None

        def product(rows: slice) -> LinearOp:
            return self.make_linear([weight[rows]], None if bias is None else bias[rows], fusion)

        return product(slice(size)), product(slice(size, None))

    def _linear(self, parts: list[str], has_bias: bool, fusion: Fusion = NO_FUSION) -> LinearOp:
        bias = join(self._parts([f"{part}.bias" for part in parts])) if has_bias else None
        if self._is_packed(parts):
            return self._packed_linear(parts, bias, fusion, self.make_linear)
        return self.make_linear(self._parts([f"{part}.weight" for part in parts]), bias, fusion)

    def _packed_linear(
        self, parts: list[str], bias: Tensor | None, fusion: Fusion, make_linear: MakeLinear
    ) -> LinearOp:
        """Packs a quantized product; with `unpack`, make_linear packs the plain weight."""
        assert self.spec.packed is not None
        try:
            packed = self.spec.packed.load(self.checkpoint.fetch, parts)
        except ValueError as error:
            raise ModelLoadError(f"{self.checkpoint.path}: {error}") from error
        if self.unpack:
            return make_linear([self._cast(packed.plain())], bias, fusion)
        assert self.linears is not None, "a back end without quantized products"
        return packed.linear(bias, fusion, self.linears)

    def _parts(self, names: list[str]) -> list[Tensor]:
        """Fetches tensors as [out, in] (or [out])."""
        parts = [self.checkpoint.fetch(name) for name in names]
        if self.names.is_transposed:
            parts = [part.t() for part in parts]
        return [self._cast(part) for part in parts]

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.weight_dtype or tensor.dtype)

    def _head(self, norm: Norm | None) -> LinearOp:
        if self._is_packed([self.names.head]):
            return self._packed_linear([self.names.head], None, Fusion(norm), self.make_head)
        weight = self._cast(self.checkpoint.fetch(self._head_name))
        return self.make_head([weight], None, Fusion(norm))

    def _norm(self, name: str) -> Norm:
        spec = self.spec
        if not spec.has_norm_weight:
            ones = torch.ones(spec.hidden_size, dtype=self.dtype, device=self.device)
            return Norm(spec.norm, ones, None, spec.norm_eps)
        bias = self._vector(f"{name}.bias") if spec.has_norm_bias else None
        return Norm(spec.norm, self._vector(f"{name}.weight"), bias, spec.norm_eps)

    def _vector(self, name: str) -> Tensor:
        """Returns a copy, so that the file can be unmapped."""
        return self.checkpoint.fetch(name).to(self.device, self.dtype, copy=True)

    def _table(self, name: str) -> Tensor:
        """Returns a copy, so that replacing the file does not affect a running model."""
        return self.checkpoint.fetch(name).to(self.device, copy=True)

    @property
    def _embed_name(self) -> str:
        return f"{self.prefix}{self.names.embed}.weight"

    @property
    def _head_name(self) -> str:
        """The head's tensor; as in Transformers, a tied model uses its own head if there is one."""
        name = f"{self.names.head}.weight"
        is_shared = self.spec.is_tied and name not in self.checkpoint.entries
        return self._embed_name if is_shared else name


def _sizes_of_parts(parts: tuple[str, ...], sizes: list[int]) -> list[int]:
    """Returns the sizes of the stored tensors; a single tensor has their sum."""
    return sizes if len(parts) == len(sizes) else [sum(sizes)]
