"""The kernels of mixtures of experts as machine code.

Only the child process imports ops.triton_kernels, since this process may interpret the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cuda.triton_compile import SHARED_LIMITS, Case, Compiled, compile_module

pytestmark = pytest.mark.exhaustive

TABLES = ("weights_at", "scales_at", "biases_at", "packed_at", "words_at", "channels_at")
ROWS = {"x_at": "*i8", "row_scales_at": "*fp32", "out_at": "*bf16"}
PAIRS = {"order_at": "*i32", "starts_at": "*i32"}


def int8_case(name: str, tile, arch: int, **switches) -> Case:
    from ops.triton_kernels.experts import scaled_experts_kernel

    sizes = ("N", "K", "x_stride", "w_stride", "out_stride")
    usual = {"PER_ROW": 1, "BIAS": False, "ACT": 0, "GATED": False, "EVEN_K": True}
    return Case(
        name,
        scaled_experts_kernel,
        {**ROWS, **PAIRS, **dict.fromkeys(TABLES[:3], "*i64"), **dict.fromkeys(sizes, "i32")},
        {**usual, "BM": tile.m, "BN": tile.n, "BK": tile.k, "SWAP": tile.swap, **switches},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        arch=arch,
        divisible=sizes,
        enable_fp_fusion=False,
    )


def int4_case(name: str, tile, arch: int, *, group: int = 64, table: int = 0, **switches) -> Case:
    from ops.triton_kernels.experts import int4_experts_kernel
    from ops.triton_kernels.linear4 import PANEL

    sizes = ("N", "N_padded", "chunks", "x_stride", "out_stride")
    half = max(group, 64) // 2
    how = {"STAGES": tile.num_stages, "GROUP": group, "HALF": half, "CHUNKS": tile.k // half}
    usual = {"PER_ROW": 8, "BIAS": False, "ACT": 0, "GATED": False}
    kind = {"TABLE": table, "MINIMUMS": False, "ASM": True, "PANEL": PANEL}
    tables = dict.fromkeys((*TABLES[3:], "biases_at"), "*i64")
    return Case(
        name,
        int4_experts_kernel,
        {**ROWS, **PAIRS, "sums_at": "*i32", **tables, **dict.fromkeys(sizes, "i32")},
        {**how, **kind, **usual, "BM": tile.m, "BN": tile.n, **switches},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        arch=arch,
        divisible=sizes,
        enable_fp_fusion=False,
    )


def plain_case(name: str, arch: int, kind: str = "bf16", **switches) -> Case:
    import torch

    from ops.triton_kernels.experts_plain import TILES, plain_experts_kernel

    tile = TILES[torch.bfloat16 if kind == "bf16" else torch.float32]
    sizes = ("N", "K", "x_stride", "w_stride", "out_stride")
    usual = {"PER_ROW": 8, "BIAS": False, "ACT": 0, "GATED": False, "EVEN_K": True}
    return Case(
        name,
        plain_experts_kernel,
        {
            **dict.fromkeys(("x_at", "first_at", "out_at"), f"*{kind}"),
            **dict.fromkeys(("weights_at", "biases_at"), "*i64"),
            **PAIRS,
            **dict.fromkeys(sizes, "i32"),
        },
        {**usual, "BM": tile.m, "BN": tile.n, "BK": tile.k, **switches},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        arch=arch,
        divisible=sizes,
        enable_fp_fusion=False,
    )


def compile_cases() -> Iterator[Case]:
    from ops.triton_kernels.experts import sort_kernel, sum_kernel
    from ops.triton_kernels.linear import Tile

    gated = {"GATED": True, "PER_ROW": 8}
    stream = Tile(16, 32, 256, 4, 4, swap=True)
    yield int8_case("int8_stream", stream, 90, ACT=1, **gated)
    yield int8_case("int8_stream_80", stream, 80, ACT=1, **gated)
    yield int8_case("int8_stream_89", stream, 89)
    yield int8_case("int8_square", Tile(64, 128, 128, 4, 4), 90, ACT=1, **gated)
    yield int8_case("int8_square_80", Tile(64, 128, 64, 8, 4), 80)
    few = Tile(16, 32, 256, 2, 4, swap=True)
    yield int4_case("int4_stream", few, 90, ACT=1, GATED=True)
    yield int4_case("int4_stream_80", few, 80, group=128)
    yield int4_case("int4_stream_89", few._replace(num_stages=3), 89)
    clamped = {"ACT": 6, "GATED": True, "BIAS": True}
    yield int4_case("mxfp4_stream", few, 90, group=32, table=2, **clamped)
    yield int4_case("int4_square", Tile(64, 64, 128, 4, 4, swap=True), 90)
    for arch in (80, 89, 90):
        yield plain_case(f"plain_square_{arch}", arch, ACT=1, GATED=True)
        yield plain_case(f"plain_down_square_{arch}", arch, BIAS=True, PER_ROW=1)
        yield plain_case(f"plain_fp32_{arch}", arch, "fp32", ACT=6, GATED=True, BIAS=True)
    experts = {**PAIRS, "experts_at": "*i32", "num_pairs": "i32"}
    for arch in (80, 90):
        yield Case(f"sort_{arch}", sort_kernel, experts, {"BLOCK": 256}, arch=arch)
        yield Case(
            f"sum_{arch}",
            sum_kernel,
            {
                **dict.fromkeys(("weights_at", "residual_at", "out_at"), "*fp32"),
                "parts_at": "*bf16",
                **dict.fromkeys(("N", "residual_stride", "out_stride", "top_k"), "i32"),
            },
            {"WEIGHTED": True, "RESIDUAL": True, "BLOCK": 1024},
            arch=arch,
            divisible=("N", "residual_stride", "out_stride"),
            enable_fp_fusion=False,
        )


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return compile_module(__name__)


def test_nothing_spills_and_all_fits(compiled):
    assert len(compiled) == 23
    for name, one in compiled.items():
        arch = next((a for a in SHARED_LIMITS if name.endswith(str(a))), 90)
        assert one.stack == 0, f"{name}: {one.stack} bytes of stack"
        assert one.shared <= SHARED_LIMITS[arch], f"{name}: {one.shared:,} bytes shared"


def test_products_use_tensor_cores_and_wide_copies(compiled):
    """Weights found by address are still copied in 16 bytes while others are multiplied."""
    for name, one in compiled.items():
        if "stream" not in name and "square" not in name:
            continue
        assert "mma.sync" in one.ptx or "wgmma.mma_async" in one.ptx, name
        assert "cp.async.cg.shared.global" in one.ptx, name
