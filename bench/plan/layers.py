"""The attention of one layer as plans count it: operations, and bytes of K/V."""

from __future__ import annotations

from typing import NamedTuple

from quant.kv import kv_format, latent_format
from serve.errors import ConfigError

_PLAIN_BYTES = {"float32": 4, "bfloat16": 2}
_TILE_TOKENS = 16


class LayerAttention(NamedTuple):
    """One layer's attention. window: the keys that a row sees at most; None: all. value_dim: the
    first values of a latent that are V; None: V is stored beside K. decode: operations of a row
    and a key; prefill: the least of any software, which may expand a latent. is_shared: K/V is
    another layer's; it is read, and not stored again."""

    window: int | None
    num_kv_heads: int
    head_dim: int
    decode: int
    prefill: int
    value_dim: int | None = None
    is_shared: bool = False

    def read_bytes(self, kv: str, group: int) -> float:
        """Returns the bytes of a token's K/V in the type kv, with groups of int8 and int4 of at
        most `group`."""
        width = self.num_kv_heads * self.head_dim
        if kv in _PLAIN_BYTES:
            return float(width * (2 if self.value_dim is None else 1) * _PLAIN_BYTES[kv])
        if self.value_dim is not None:
            latent = latent_format(self.value_dim, self.head_dim, group) if kv == "int8" else None
            if latent is None:
                raise ConfigError(f"kv_dtype {kv} has no latents of {self.head_dim}")
            return latent.tile_bytes / _TILE_TOKENS
        fitting = kv_format(kv, self.num_kv_heads, self.head_dim, group)
        if fitting is None:
            raise ConfigError(
                f"kv_dtype {kv} needs a head_dim of a multiple of 16 up to 512, not {self.head_dim}"
            )
        return float(fitting.token_bytes)

    def stored_bytes(self, kv: str, group: int) -> float:
        """Returns the bytes that a token's K/V takes."""
        return 0.0 if self.is_shared else self.read_bytes(kv, group)
