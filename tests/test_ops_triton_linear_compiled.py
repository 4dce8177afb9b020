"""The row and linear kernels (ops/triton_rows.py, ops/triton_linear.py) as machine code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ops.triton_linear import Tile
from tests.triton_compile import SHARED_LIMITS, Case, Compiled, compile_module

ROW_STRIDES = dict.fromkeys(
    ("x_stride", "x_inner_stride", "inner", "out_stride", "n", "n_padded"), "i32"
)
ROW_WHOLE = ("x_stride", "x_inner_stride", "out_stride", "n", "n_padded")


def row_cases() -> Iterator[Case]:
    from ops.triton_rows import rows_kernel

    pointers = {"x_at": "*fp32", "weight_at": "*fp32", "out_at": "*i8", "scales_at": "*fp32"}
    usual = {"ACT": 0, "GATED": False, "ONE_BLOCK": True, "BLOCK": 4096}
    for norm in (1, 2):
        yield Case(
            f"norm{norm}_quantize",
            rows_kernel,
            {**pointers, "bias_at": "*fp32", **ROW_STRIDES, "eps": "fp32"},
            {**usual, "NORM": norm, "BIAS": norm == 2, "QUANTIZE": True},
            num_warps=8,
            divisible=ROW_WHOLE,
            enable_fp_fusion=False,
        )
    yield Case(
        "gated_long_rows",
        rows_kernel,
        {**pointers, "x_at": "*bf16", **ROW_STRIDES, "eps": "fp32", "bias_at": "*fp32"},
        {
            "NORM": 0,
            "BIAS": False,
            "QUANTIZE": True,
            "ACT": 1,
            "GATED": True,
            "ONE_BLOCK": False,
            "BLOCK": 8192,
        },
        num_warps=16,
        divisible=ROW_WHOLE,
        enable_fp_fusion=False,
    )


def int8_case(name: str, tile: Tile, *, out: str = "*bf16", arch: int = 90, **switches) -> Case:
    from ops.triton_linear import int8_kernel

    sizes = ("K", "x_stride", "w_stride", "residual_stride", "out_stride")
    usual = {"BIAS": False, "ACT": 0, "GATED": False, "RESIDUAL": False, "EVEN_K": True}
    pointers = {
        "x_at": "*i8",
        "row_scales_at": "*fp32",
        "w_at": "*i8",
        "scales_at": "*fp32",
        "bias_at": "*fp32",
        "residual_at": "*fp32",
        "out_at": out,
        "sums_at": "*i32",
        "counts_at": "*i32",
    }
    how = {
        "BM": tile.m,
        "BN": tile.n,
        "BK": tile.k,
        "SWAP": tile.swap,
        "SPLIT_K": tile.split_k,
        "GROUP_M": tile.group_m,
    }
    return Case(
        name,
        int8_kernel,
        {**pointers, **dict.fromkeys(("M", "N", *sizes), "i32")},
        {**usual, **how, **switches},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        arch=arch,
        divisible=("N", *sizes),
        enable_fp_fusion=False,
    )


LARGE = Tile(128, 256, 128, 8, 4)
STREAM = Tile(16, 32, 512, 4, 4, swap=True)


def int8_cases() -> Iterator[Case]:
    gate = {"ACT": 1, "GATED": True}
    yield int8_case("int8_large", LARGE)
    yield int8_case("int8_large_gated", LARGE, **gate)
    yield int8_case("int8_large_residual", LARGE, out="*fp32", RESIDUAL=True)
    yield int8_case("int8_square", Tile(128, 128, 128, 8, 4))
    yield int8_case("int8_middle", Tile(64, 128, 128, 4, 4, split_k=4))
    yield int8_case("int8_stream", STREAM)
    yield int8_case("int8_stream_gated", STREAM, **gate)
    yield int8_case("int8_stream_8", Tile(8, 16, 1024, 4, 4, swap=True, split_k=2), EVEN_K=False)
    yield int8_case("int8_80", Tile(128, 128, 64, 8, 4), arch=80)
    yield int8_case("int8_89", Tile(128, 128, 64, 8, 3), arch=89)


def compile_cases() -> Iterator[Case]:
    yield from row_cases()
    yield from int8_cases()


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return compile_module(__name__)


def test_nothing_spills_and_all_fits(compiled):
    assert compiled
    for name, one in compiled.items():
        arch = next((a for a in SHARED_LIMITS if name.endswith(str(a))), 90)
        assert one.stack == 0, f"{name}: {one.stack} bytes of stack"
        assert one.shared <= SHARED_LIMITS[arch], f"{name}: {one.shared:,} bytes shared"


def test_rows_are_read_wide(compiled):
    for name in ("norm1_quantize", "norm2_quantize", "gated_long_rows"):
        assert "ld.global.v4.b32" in compiled[name].ptx, name
