"""The attention interface of Transformers, whose calls become nodes of the exported graph.

A model calls `_attend` once for each attention, with rotated queries and keys. While the model is
exported the call leaves an operator in the graph, which model.py replaces by the attention seam.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serve.errors import ModelLoadError

NAME = "mergestep"
# keywords of the interface that change nothing in what is computed for rows with positions
_IGNORED = frozenset({"dropout", "position_ids", "use_cache", "return_dict", "cache_position"})


@torch.library.custom_op("mergestep::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int, cap: float
) -> Tensor:
    """Stands for causal attention in a graph: [1, T, H, Dv] for q: [1, H, T, D].

    sinks: [H], logits without values. window, cap (a soft cap of the scores): 0 for none.
    """
    raise NotImplementedError("the attention seam takes the place of this operator")


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int, cap: float
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


OPERATOR = torch.ops.mergestep.attention.default


@dataclass(frozen=True, slots=True)
class Mask:
    """A causal mask that is not made: the window of its rows, None for all earlier keys."""

    window: int | None

    def __getitem__(self, index: object) -> Mask:
        """Returns the mask itself, since models cut masks to the number of keys."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unsupported("an attention mask that it changes itself")


def register() -> None:
    """Makes the interface known to Transformers. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, **kwargs: Any) -> Any:
    """Notes what a mask would hide. ModelLoadError for what is neither causal nor a window."""
    if "allow_is_bidirectional_skip" in kwargs:
        raise unsupported("attention to later tokens (a bidirectional mask)")
    if kwargs.get("use_vmap"):
        raise unsupported("an attention mask with a function of its own")
    return Mask(kwargs.get("local_size"))


def _attend(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, **kwargs: Any
) -> tuple[Tensor, None]:
    """Leaves the operator in the graph. ModelLoadError for what the seam cannot do."""
    if mask is not None and not isinstance(mask, Mask):
        raise unsupported("an attention mask that the model makes itself")
    is_causal = kwargs.pop("is_causal", None)
    if is_causal is False or (is_causal is None and not getattr(module, "is_causal", True)):
        raise unsupported("attention to later tokens (is_causal is false)")
    if q.shape[2] != k.shape[2]:
        raise unsupported("attention over keys of another input (cross attention)")
    window, cap = kwargs.pop("sliding_window", None), kwargs.pop("softcap", None)
    sinks = kwargs.pop("s_aux", None)
    if isinstance(mask, Mask):
        window = mask.window
    scale = kwargs.pop("scaling", None)
    for name, value in kwargs.items():
        if value is None or name in _IGNORED or name.startswith("output_"):
            continue
        raise unsupported(f"the argument {name} of its attention")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return OPERATOR(q, k, v, sinks, float(scale), int(window or 0), float(cap or 0.0)), None


def unsupported(what: str) -> ModelLoadError:
    """Returns the error that a model needs something the converter does not have."""
    return ModelLoadError(f"converter: the model needs {what}, which is not supported")
