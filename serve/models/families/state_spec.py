"""The switches of layers that keep a state of fixed size, which families read from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from memory.states.layout import StateLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A gated short convolution (LFM2): one product of the input gives b, c and x, of `channels`
    values each, and another one takes c * conv(b * x)."""

    channels: int
    width: int
    has_bias: bool = False

    @property
    def out_size(self) -> int:
        return self.channels

    @property
    def layer(self) -> StateLayer:
        return StateLayer((self.width - 1, self.channels))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """A gated delta net (arXiv 2412.06464), or Kimi Delta Attention (arXiv 2510.26692).

    q and k have num_key_heads heads of key_dim values, v has num_heads of value_dim; head h reads
    the keys of head h // (num_heads / num_key_heads). beta_scale: as in Recurrence.
    has_channel_decay: each value of a key decays by itself. gate: the activation of the output's
    gates. rank: that of the products that give decays and gates; None: the full one.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    width: int
    norm_eps: float
    beta_scale: float = 1.0
    has_channel_decay: bool = False
    gate: str = "silu"
    rank: int | None = None

    @property
    def low_rank(self) -> int:
        """The rank of the products that have one."""
        assert self.rank is not None
        return self.rank

    @property
    def num_gates(self) -> int:
        """The values of a row from which b and a follow."""
        return self.num_heads + (self.num_heads if self.rank is None else self.rank)

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def out_size(self) -> int:
        return self.value_size

    @property
    def conv_size(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def layer(self) -> StateLayer:
        heads = self.num_heads, self.key_dim, self.value_dim
        return StateLayer((self.width - 1, self.conv_size), heads, self.num_gates)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Mamba-2 (arXiv 2405.21060).

    One product of the input gives the gate z and x, num_heads * head_dim values each, B and C,
    num_groups * state_size each, and a step dt for each head; dt_min and dt_max limit it. scales:
    factors of the input, z, x, B, C, dt and the output (Falcon-H1). norm_group: the values that
    the norm of the output takes together; 0: there is no norm. gates_first: the gate comes before
    the norm. has_bias: the first product has one.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    width: int
    norm_eps: float
    norm_group: int
    gates_first: bool = True
    has_bias: bool = False
    has_out_bias: bool = False
    has_conv_bias: bool = True
    dt_min: float = 0.0
    dt_max: float = inf
    in_scale: float = 1.0
    part_scales: tuple[float, ...] = ()
    out_scale: float = 1.0

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The sizes of z, x, B, C and dt."""
        keys = self.num_groups * self.state_size
        return self.inner_size, self.inner_size, keys, keys, self.num_heads

    @property
    def out_size(self) -> int:
        return self.inner_size

    @property
    def conv_size(self) -> int:
        return sum(self.part_sizes[1:4])

    @property
    def layer(self) -> StateLayer:
        heads = self.num_heads, self.state_size, self.head_dim
        return StateLayer((self.width - 1, self.conv_size), heads, self.num_heads)


StateSpec = ShortConvSpec | DeltaNetSpec | MambaSpec
