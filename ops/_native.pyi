from collections.abc import Sequence
from typing import overload

TILE: int
MAX_PARTS: int
MAX_PLAIN_DIM: int
MAX_LATENT_DIM: int
MAX_HEAD_DIM: int
DRAW_BYTES: int
DRAWN_BYTES: int
MAX_TOP: int
MAX_CONV_WIDTH: int

def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def choose_instruction_set(name: str) -> bool: ...
def num_threads() -> int: ...
def may_use_matrix() -> bool: ...
def set_num_threads(n: int) -> None: ...

class Host:
    def begin(self) -> None: ...
    def end(self) -> None: ...

class Guest:
    def __init__(self, host: Host) -> None: ...
    def enter(self) -> None: ...
    @staticmethod
    def leave() -> None: ...
    def admit(self) -> bool: ...
    def end(self) -> None: ...
    @property
    def has_ended(self) -> bool: ...

def argmax(logits: int, stride: int, rows: int, size: int) -> list[int]: ...
def sample(logits: int, stride: int, rows: int, size: int, draws: int, out: int) -> bool: ...
def describe_tokens(
    logits: int, stride: int, rows: int, size: int, tokens: int, num_top: int, out: int
) -> bool: ...
def rotate(
    x: int, stride: int, rows: int, heads: int, head_dim: int, cos: int, sin: int, half: int
) -> None: ...
def decode_plain(
    sequences: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    dtype: int,
    q: int,
    q_stride: int,
    q_type: int,
    out: int,
    lse: int,
) -> None: ...
def merge_partials(
    out: int,
    dtype: int,
    lse: int,
    part_out: int,
    part_type: int,
    part_lse: int,
    stride: int,
    lse_stride: int,
    rows: int,
    num_rows: int,
    heads: int,
    head_dim: int,
) -> None: ...
def quantize_heads(
    x: int, stride: int, dtype: int, rows: int, heads: int, head_dim: int, values: int, scales: int
) -> None: ...
def dequantize_heads(
    values: int, scales: int, rows: int, heads: int, head_dim: int, out: int, dtype: int
) -> None: ...
def route(
    x: int,
    x_stride: int,
    x_type: int,
    rows: int,
    experts: int,
    weights: int,
    weight: int,
    weight_type: int,
    bias: int,
    correction: int,
    expert_scales: int,
    num_experts: int,
    num_in: int,
    top_k: int,
    is_sigmoid: bool,
    is_after_top_k: bool,
    is_normalized: bool,
    sum_eps: float,
    scale: float,
    num_groups: int,
    num_top_groups: int,
    group_best: int,
) -> None: ...
def unpack_nibbles(packed: int, num_bytes: int, is_low_first: bool, codes: int) -> None: ...
def round_rows(
    codes: int,
    stride: int,
    kind: int,
    rows: int,
    num_in: int,
    group: int,
    scales: int,
    zeros: int,
    to: int,
    steps: int,
) -> None: ...
def checksum(address: int, size: int) -> int: ...
def read_bytes(address: int, size: int) -> int: ...
def copy_bytes(to: int, source: int, size: int) -> None: ...
def multiply_i8(rounds: int) -> float: ...
def multiply_f32(rounds: int) -> float: ...
def multiply_bf16(rounds: int) -> float: ...

class _Linear:
    bytes: int
    product: int
    buffers: list[int]
    def set_norm(self, kind: int, weight: int, bias: int, eps: float) -> None: ...
    def run(
        self,
        x: int,
        x_stride: int,
        x_type: int,
        rows: int,
        out: int,
        out_stride: int,
        out_type: int,
        add: bool,
    ) -> None: ...
    def only_quantize(self, x: int, x_stride: int, x_type: int, rows: int) -> None: ...

class Int8Linear(_Linear):
    @overload
    def __init__(
        self,
        num_in: int,
        num_out: int,
        parts: list[int],
        dtype: int,
        bias: int,
        activation: int,
        is_gated: bool,
    ) -> None: ...
    @overload
    def __init__(
        self,
        num_in: int,
        num_out: int,
        weight: int,
        scales: int,
        bias: int,
        activation: int,
        is_gated: bool,
    ) -> None: ...
    @staticmethod
    def restore(
        num_in: int, num_out: int, buffers: list[int], activation: int, is_gated: bool
    ) -> Int8Linear: ...

class SuperblockLinear(_Linear):
    kind: int
    def __init__(
        self,
        num_in: int,
        num_out: int,
        kind: int,
        parts: list[int],
        channel_scales: int,
        bias: int,
        activation: int,
        is_gated: bool,
    ) -> None: ...
    @staticmethod
    def restore(
        num_in: int,
        num_out: int,
        kind: int,
        buffers: list[int],
        activation: int,
        is_gated: bool,
    ) -> SuperblockLinear: ...

class PlainLinear:
    bytes: int
    product: int
    buffers: list[int]
    @staticmethod
    def restore(
        num_in: int, num_out: int, dtype: int, buffers: list[int], activation: int, is_gated: bool
    ) -> PlainLinear: ...
    def __init__(
        self,
        num_in: int,
        num_out: int,
        weight: int,
        stride: int,
        dtype: int,
        bias: int,
        activation: int,
        is_gated: bool,
    ) -> None: ...
    def set_norm(self, kind: int, weight: int, bias: int, eps: float) -> None: ...
    def run(
        self, x: int, x_stride: int, rows: int, out: int, out_stride: int, add: bool
    ) -> None: ...

class Int4Linear(_Linear):
    group: int
    codes: int
    @staticmethod
    def restore(
        num_in: int,
        num_out: int,
        group: int,
        codes: int,
        buffers: list[int],
        activation: int,
        is_gated: bool,
    ) -> Int4Linear: ...
    def __init__(
        self,
        num_in: int,
        num_out: int,
        codes: int,
        scales: int,
        zeros: int,
        minimums: int,
        channel_scales: int,
        group: int,
        table: int,
        bias: int,
        activation: int,
        is_gated: bool,
    ) -> None: ...

class ExpertLayer:
    def __init__(
        self,
        ups: Sequence[int],
        up_kind: int,
        downs: Sequence[int],
        down_kind: int,
        scales_input: bool,
    ) -> None: ...
    def run(
        self,
        x: int,
        x_stride: int,
        x_type: int,
        rows: int,
        top_k: int,
        experts: int,
        weights: int,
        out: int,
        out_stride: int,
        out_type: int,
        add: bool,
        part: int,
    ) -> None: ...

class HeadLayer:
    def __init__(self, products: Sequence[int], kind: int) -> None: ...
    def run(
        self, x: int, stride: int, head_stride: int, dtype: int, rows: int, out: int
    ) -> None: ...

class StatePlan:
    def __init__(
        self,
        firsts: int,
        sources: int,
        targets: int,
        num_segments: int,
        sequences: int,
        num_sequences: int,
        states: int,
        stride: int,
        num_records: int,
        rows: int,
    ) -> None: ...

def convolve(
    plan: StatePlan,
    x: int,
    stride: int,
    dtype: int,
    channels: int,
    width: int,
    weight: int,
    bias: int,
    has_silu: bool,
    out: int,
) -> None: ...
def gate_and_norm(
    x: int,
    x_stride: int,
    x_type: int,
    gate: int,
    gate_stride: int,
    gate_type: int,
    rows: int,
    num_in: int,
    group: int,
    weight: int,
    eps: float,
    is_silu: bool,
    gates_first: bool,
    out: int,
) -> None: ...

class LinearAttentionCall:
    def __init__(
        self,
        heads: int,
        key_heads: int,
        key_dim: int,
        value_dim: int,
        rates: int,
        bias: int,
        skip: int,
        is_delta: bool,
        is_per_channel: bool,
        has_unit_keys: bool,
        scale: float,
        beta_scale: float,
        dt_min: float,
        dt_max: float,
    ) -> None: ...
    def run(
        self,
        plan: StatePlan,
        dtype: int,
        q: int,
        q_stride: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        a: int,
        a_stride: int,
        b: int,
        b_stride: int,
        out: int,
    ) -> None: ...

class StepPlan:
    def __init__(
        self,
        cache: int,
        tile_bytes: int,
        starts: Sequence[int],
        num_rows: Sequence[int],
        kv_lens: Sequence[int],
        past_only: bool,
    ) -> None: ...
    def add_recent(self, cache: int, tile_bytes: int, starts: Sequence[int]) -> None: ...
    def add_bounds(self, cache: int, tile_bytes: int, starts: Sequence[int]) -> None: ...
    @property
    def num_tiles(self) -> int: ...
    def select(self, num_selecting: Sequence[int], budgets: Sequence[int]) -> None: ...

class QuantizedAttention:
    def __init__(
        self,
        offset_bytes: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        group: int,
        bits: int,
        scale: float,
        window: int,
        soft_cap: float,
        slopes: Sequence[float],
        sinks: Sequence[float],
        recent_offset: int = 0,
        recent_group: int = 0,
        bounds_offset: int = -1,
    ) -> None: ...
    def append(
        self, step: StepPlan, k: int, v: int, stride: int, cos: int, sin: int, half: int
    ) -> None: ...
    def attend(
        self,
        step: StepPlan,
        q: int,
        q_stride: int,
        out: int,
        out_stride: int,
        lse: int,
        phase: int = 0,
        sums: int = 0,
    ) -> None: ...
    def choose(self, step: StepPlan, q: int, q_stride: int, is_read: int) -> None: ...
    def attend_chosen(
        self, step: StepPlan, q: int, q_stride: int, out: int, out_stride: int, lse: int
    ) -> None: ...
    def list_tiles(
        self, step: StepPlan, q: int, q_stride: int, num_tiles: int, wanted: int, lists: int
    ) -> None: ...
    def attend_listed(
        self,
        step: StepPlan,
        q: int,
        num_tiles: int,
        wanted: int,
        lists: int,
        counts: int,
        out: int,
        lse: int,
    ) -> None: ...

def count_tiles(parts: Sequence[int], rows: int, kv_heads: int) -> None: ...

class LatentAttention:
    def __init__(
        self,
        offset_bytes: int,
        num_heads: int,
        value_dim: int,
        rope_dim: int,
        group: int,
        rope_group: int,
        scale: float,
    ) -> None: ...
    def append(
        self, step: StepPlan, k: int, stride: int, cos: int, sin: int, half: int
    ) -> None: ...
    def attend(
        self, step: StepPlan, q: int, q_stride: int, out: int, lse: int, with_matrix: bool
    ) -> None: ...

class IoRing:
    def __init__(self, fd: int, depth: int, sqpoll: bool, iopoll: bool) -> None: ...
    def register_buffers(self, regions: Sequence[tuple[int, int]]) -> None: ...
    def submit(self, operations: list[int]) -> int: ...
    def reap(self, at_least: int, timeout_s: float) -> list[tuple[int, int]]: ...
