"""The number formats a model runs in, decided once at start-up and logged with the reason.

"int8" means int8 x int8 products (W8A8) on an fp32 residual stream. "auto" chooses it for 16-bit
checkpoints of families that tolerate it, if the device has fast kernels for it. "int4" and "nf4"
are 4-bit weights on int8 rows with the last product in int8; the scales of "int4-searched" are
searched. "fp8" is e4m3 x e4m3 on GPUs that support it. "auto" never chooses these. A checkpoint
that is already quantized keeps its weights on int8 rows, and its plain weights become int8. With
bfloat16 or float32, or if the family does not tolerate int8 rows, its weights are unpacked at load.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial

import torch

from memory.attention.seam import AttentionLayer
from memory.attention.tiled import TILED_TYPES, TiledKVLayout
from ops import Backend, best_backend
from ops.cpu import native_library
from ops.kv_tiles import MAX_HEAD_DIM
from quant.kv import MAX_LATENT_DIM
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.models import ModelSpec
from serve.models.tensors import MakeLinear

logger = logging.getLogger(__name__)

_TORCH_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FP8_CAPABILITY = (8, 9)
ROUNDED_TO_4_BITS = ("int4", "int4-searched", "nf4")


@dataclass(frozen=True, slots=True)
class Precision:
    """The number formats of a model.

    compute: type of activations. weights: plain (in compute's type), int8, int4, int4-searched, nf4
    or fp8. kv: type of K/V in memory. packed: the checkpoint's own quantization method, kept unless
    weights is plain. backend: a name in ops.BACKENDS. reason, kv_reason: explanations for the user.
    """

    compute: torch.dtype
    weights: str
    kv: str
    packed: str | None = None
    backend: str = "cpu"
    reason: str = field(default="", compare=False)
    kv_reason: str = field(default="", compare=False)

    @property
    def weights_name(self) -> str:
        """The name of the products' number format."""
        name = self.weights if self.is_int8 else _name(self.compute)
        if self.packed:
            name = self.packed if self.is_int8 else f"{self.packed} as {name}"
        return name

    @property
    def is_int8(self) -> bool:
        """Whether products take rows of 8 bits."""
        return self.weights != "plain"

    def __str__(self) -> str:
        return f"{self.weights_name}, K/V {self.kv}"


def resolve_precision(
    config: EngineConfig, spec: ModelSpec, *, is_trial: bool = False
) -> Precision:
    """Resolves the settings dtype and kv_dtype. ConfigError if one is not supported here.

    is_trial: nothing is loaded with it, and the choices are not logged.
    """
    level = logging.DEBUG if is_trial else logging.INFO
    dtype, packed = config.dtype, spec.packed.method if spec.packed else None
    backend = choose_backend(config, spec)
    if packed and dtype in (*ROUNDED_TO_4_BITS, "fp8"):
        raise ConfigError(
            f"dtype {dtype} is not available: the checkpoint is already quantized ({packed}); "
            "use auto, int8, bfloat16 or float32"
        )
    reason = kv_reason = "as asked for"
    if dtype == "auto":
        dtype, reason = _best_dtype(backend, spec)
        logger.log(level, "dtype auto: %s (%s)", dtype, reason)
    compute, weights = _TORCH_TYPES.get(dtype, torch.float32), "plain"
    if dtype not in _TORCH_TYPES:
        _require(backend, "dtype", dtype)
        weights = dtype
    is_int8 = weights != "plain"
    kv = config.kv_dtype
    can_int8 = TiledKVLayout.supports(spec.attention_layers, "int8")
    if kv == "auto":
        kv = "int8" if is_int8 and can_int8 else _name(compute)
        kv_reason = "as the products"
        if is_int8 and not can_int8:
            kv = "bfloat16"  # the compute type is fp32, twice the bytes
            kv_reason = f"int8 K/V has no heads of {_some(_head_dims(spec))}"
            logger.log(level, "kv_dtype auto: bfloat16 (%s)", kv_reason)
    if kv in TILED_TYPES:
        _require_kv(backend, kv, spec)
    return Precision(compute, weights, kv, packed, backend, reason, kv_reason)


def _require_kv(backend: str, kv: str, spec: ModelSpec) -> None:
    """Raises ConfigError if K/V of a model cannot be int8, or int4."""
    if kv == "int4" and backend != "cpu":
        others = "auto, int8" if backend == "cuda" else "auto"
        raise ConfigError(
            f"kv_dtype int4 needs the cpu back end, not {backend}; use {others}, bfloat16 or"
            " float32"
        )
    _require(backend, "kv_dtype", kv)
    if TiledKVLayout.supports(spec.attention_layers, kv):
        return
    if kv == "int4" and any(layer.value_dim is not None for layer in spec.attention_layers):
        raise ConfigError(
            f"kv_dtype int4 is not available for the latents of {spec.model_type}; use auto, int8,"
            " bfloat16 or float32"
        )
    raise ConfigError(
        f"kv_dtype {kv} needs a head_dim of a multiple of 16 up to 512, not "
        f"{_some(_head_dims(spec))}"
    )


def _head_dims(spec: ModelSpec) -> list[int]:
    """Returns the different head_dims of the layers, the smallest first."""
    return sorted({layer.head_dim for layer in spec.attention_layers})


def _some(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))


def packers(
    config: EngineConfig, precision: Precision, backend: Backend
) -> tuple[MakeLinear, MakeLinear] | None:
    """Returns what packs products and the last one into 8 bits or fewer; None: they stay plain."""
    if not precision.is_int8:
        return None
    linears = backend.quantized
    assert linears is not None, "resolve_precision checks this"
    make_linear: MakeLinear = linears.int8
    if precision.weights == "fp8":
        make_linear = linears.fp8
    elif precision.weights in ROUNDED_TO_4_BITS:
        make_linear = partial(
            linears.rounded4,
            group=config.weight_group,
            is_nf4=precision.weights == "nf4",
            is_searched=precision.weights == "int4-searched",
        )
    return make_linear, partial(linears.int8, is_head=True)


def choose_backend(config: EngineConfig, spec: ModelSpec) -> str:
    """Returns a name in ops.BACKENDS; for "auto", the best one that supports the settings."""
    if config.backend != "auto":
        return config.backend
    best = best_backend()
    has_nodes = config.memory_nodes or config.holders or config.lend
    reason = "memory nodes are used" if has_nodes else _without_kernels(config, spec)
    if best == "cuda" and reason is not None:
        logger.warning("backend auto: cpu, not cuda (%s)", reason)
        return "cpu"
    return best


def _without_kernels(config: EngineConfig, spec: ModelSpec) -> str | None:
    """Returns what of a model the CUDA back end has no kernels for, or None."""
    layers = spec.attention_layers
    max_len = config.max_model_len or spec.max_model_len
    if any(layer.chunk is not None and layer.chunk < max_len for layer in layers):
        return "its kernels do not attend within chunks"
    heads = [x.head_dim for x in layers if x.head_dim > _largest_head(x)]
    return f"its kernels have no heads of {max(heads)}" if heads else None


def _largest_head(layer: AttentionLayer) -> int:
    return MAX_HEAD_DIM if layer.value_dim is None else MAX_LATENT_DIM


def _best_dtype(backend: str, spec: ModelSpec) -> tuple[str, str]:
    if spec.packed is None and spec.torch_dtype == "float32":
        return "float32", "the checkpoint is float32"
    plain = "bfloat16" if backend == "cuda" or _has_bf16() else "float32"
    unpacked = f"; its {spec.packed.method} weights are unpacked" if spec.packed else ""
    if backend not in ("cpu", "cuda"):
        return plain, f"the {backend} back end has no int8 products{unpacked}"
    if backend == "cpu" and not native_library.is_available():
        return plain, f"the native kernels are not built{unpacked}"
    if not spec.tolerates_int8:
        return plain, f"{spec.model_type} is known to lose accuracy in int8{unpacked}"
    if spec.packed is not None:
        return "int8", f"the checkpoint is quantized ({spec.packed.method})"
    if backend == "cuda":
        return "int8", f"{spec.torch_dtype} checkpoint, int8 tensor cores"
    if native_library.instruction_set() == "portable":
        return plain, "no int8 instructions that the kernels know"
    return "int8", f"{spec.torch_dtype} checkpoint, {native_library.instruction_set()} kernels"


def _require(backend: str, setting: str, value: str) -> None:
    if value == "fp8":
        if backend != "cuda":
            raise ConfigError(f"{setting} {value} needs the cuda back end, not {backend}")
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < _FP8_CAPABILITY:
            raise ConfigError(
                f"{setting} {value} needs compute capability 8.9, which "
                f"{torch.cuda.get_device_name()} does not have"
            )
        return
    if backend not in ("cpu", "cuda"):
        raise ConfigError(f"{setting} {value} needs the cpu or cuda back end, not {backend}")
    if backend == "cpu" and not native_library.is_available():
        raise ConfigError(f"{setting} {value} needs the native kernels, which are not built")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _has_bf16() -> bool:
    """Returns whether oneDNN has bf16 kernels for this CPU; False if torch lacks oneDNN."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
