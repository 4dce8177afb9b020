"""The row and linear kernels as machine code.

Only the child process imports ops.triton_kernels, since this process may interpret the kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.cuda.triton_compile import SHARED_LIMITS, Case, Compiled, compile_module

pytestmark = pytest.mark.exhaustive

ROW_STRIDES = dict.fromkeys(
    ("x_stride", "x_inner_stride", "inner", "out_stride", "n", "n_padded"), "i32"
)
ROW_WHOLE = ("x_stride", "x_inner_stride", "out_stride", "n", "n_padded")


def row_cases() -> Iterator[Case]:
    from ops.triton_kernels.rows import rows_kernel

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


def int8_case(
    name: str, tile, *, out: str = "*bf16", arch: int = 90, types=None, **switches
) -> Case:
    from ops.triton_kernels.linear import product_kernel

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
        product_kernel,
        {**pointers, **(types or {}), **dict.fromkeys(("M", "N", *sizes), "i32")},
        {**usual, **how, **switches},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        arch=arch,
        divisible=("N", *sizes),
        enable_fp_fusion=False,
    )


def int8_cases() -> Iterator[Case]:
    from ops.triton_kernels.linear import Tile

    large, square = Tile(128, 256, 128, 8, 4), Tile(128, 128, 128, 8, 3)
    stream = Tile(16, 32, 512, 4, 5, swap=True)
    yield int8_case("int8_large_residual", large, out="*fp32", RESIDUAL=True)
    yield int8_case("int8_square_residual", square, out="*fp32", RESIDUAL=True)
    yield int8_case("int8_stream", stream)
    yield int8_case("int8_stream_8", Tile(8, 16, 1024, 4, 4, swap=True, split_k=2), EVEN_K=False)
    yield int8_case("int8_large_80", Tile(128, 128, 64, 8, 4), arch=80)
    yield int8_case(
        "int8_stream_89", Tile(16, 32, 512, 4, 4, swap=True), arch=89, ACT=1, GATED=True
    )
    fp8 = {"x_at": "*fp8e4nv", "w_at": "*fp8e4nv"}
    yield int8_case("fp8_large", large, types=fp8)
    yield after_library_case()


def after_library_case() -> Case:
    from ops.triton_kernels.linear import finish_kernel

    pointers = dict.fromkeys(("row_scales_at", "scales_at", "bias_at", "residual_at"), "*fp32")
    sizes = ("M", "N", "residual_stride", "out_stride")
    switches = {"SCALED": False, "BIAS": False, "ACT": 1, "GATED": True, "RESIDUAL": False}
    return Case(
        "after_library",
        finish_kernel,
        {"sums_at": "*i32", **pointers, "out_at": "*bf16", **dict.fromkeys(sizes, "i32")},
        {**switches, "BM": 8, "BN": 512},
        divisible=sizes[1:],
        enable_fp_fusion=False,
    )


def small_batch_case(name: str, tile, *, arch: int = 90, x: str = "*fp32", **switches) -> Case:
    from ops.triton_kernels.small_batch import MAX_REGISTERS, small_batch_kernel

    pointers = dict.fromkeys(
        ("norm_at", "norm_bias_at", "row_scales_at", "scales_at", "bias_at", "residual_at"), "*fp32"
    )
    codes = {"x_at": x, "codes_at": "*i8", "w_at": "*i8", "out_at": "*bf16"}
    sizes = ("n", "K", "x_stride", "w_stride", "residual_stride", "out_stride")
    usual = {"BIAS": False, "ACT": 0, "GATED": False, "RESIDUAL": False, "EVEN_K": True}
    rows = {"NORM": 1, "NORM_BIAS": False, "ONE_BLOCK": True, "BLOCK": 4096}
    how = {"BM": tile.m, "BN": tile.n, "BK": tile.k, "SPLIT_K": tile.split_k}
    return Case(
        name,
        small_batch_kernel,
        {
            **pointers,
            **codes,
            **dict.fromkeys(("sums_at", "counts_at"), "*i32"),
            **dict.fromkeys(("M", "N", *sizes), "i32"),
            "eps": "fp32",
        },
        {**usual, **rows, **how, **switches},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        arch=arch,
        divisible=("N", *sizes),
        enable_fp_fusion=False,
        max_registers=MAX_REGISTERS,
    )


def small_batch_cases() -> Iterator[Case]:
    from ops.triton_kernels.linear import Tile

    tile = Tile(8, 32, 512, 4, 5, swap=True)
    yield small_batch_case("few_stream", tile, ACT=1, GATED=True)
    yield small_batch_case(
        "few_stream_long",
        Tile(8, 16, 1024, 4, 4, swap=True, split_k=2),
        x="*bf16",
        NORM=0,
        ONE_BLOCK=False,
        EVEN_K=False,
    )
    yield small_batch_case("few_stream_80", tile, arch=80, NORM=2, NORM_BIAS=True)


def int4_case(name: str, tile, *, group: int = 64, arch: int, **how) -> Case:
    from ops.triton_kernels.linear4 import PANEL, int4_kernel

    pointers = {
        "x_at": "*i8",
        "row_scales_at": "*fp32",
        "sums_at": "*i32",
        "w_at": "*i8",
        "words_at": "*i32",
        "channels_at": "*fp32",
        "bias_at": "*fp32",
        "residual_at": "*fp32",
        "out_at": "*bf16",
    }
    sizes = ("N", "N_padded", "chunks", "x_stride", "residual_stride", "out_stride")
    half = max(group, 64) // 2
    loop = {"STAGES": tile.num_stages, "GROUP": group, "HALF": half, "CHUNKS": tile.k // half}
    kind = {"TABLE": 0, "MINIMUMS": False} | how
    switches = {"BIAS": False, "ACT": 0, "GATED": False, "RESIDUAL": False, "ASM": True}
    return Case(
        name,
        int4_kernel,
        {**pointers, **dict.fromkeys(("M", *sizes), "i32")},
        {
            **loop,
            **kind,
            **switches,
            "PANEL": PANEL,
            "BM": tile.m,
            "BN": tile.n,
            "GROUP_M": tile.group_m,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        arch=arch,
        divisible=sizes,
        enable_fp_fusion=False,
    )


def int4_cases() -> Iterator[Case]:
    from ops.triton_kernels.linear import Tile

    yield int4_case("int4_stream", Tile(16, 32, 256, 2, 4, swap=True), arch=90)
    yield int4_case("nf4_stream_32", Tile(8, 32, 256, 2, 4, swap=True), TABLE=1, group=32, arch=90)
    yield int4_case("fp4_stream_16", Tile(8, 32, 256, 2, 4, swap=True), TABLE=2, group=16, arch=90)
    yield int4_case("minimums_stream", Tile(8, 32, 256, 2, 4, swap=True), MINIMUMS=True, arch=90)
    yield int4_case("fp4_large", Tile(128, 128, 64, 8, 4, swap=True), TABLE=2, group=32, arch=90)
    yield int4_case("iq4_large", Tile(128, 128, 64, 8, 4, swap=True), TABLE=3, group=32, arch=90)
    yield int4_case("minimums_large", Tile(128, 128, 64, 8, 4, swap=True), MINIMUMS=True, arch=90)
    yield int4_case("int4_large", Tile(128, 128, 64, 8, 4, swap=True), group=128, arch=90)


def compile_cases() -> Iterator[Case]:
    yield from row_cases()
    yield from int8_cases()
    yield from small_batch_cases()
    yield from int4_cases()


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return compile_module(__name__)


def test_nothing_spills_and_all_fits(compiled):
    assert len(compiled) == 22
    for name, one in compiled.items():
        arch = next((a for a in SHARED_LIMITS if name.endswith(str(a))), 90)
        assert one.stack == 0, f"{name}: {one.stack} bytes of stack"
        assert one.shared <= SHARED_LIMITS[arch], f"{name}: {one.shared:,} bytes shared"


def test_rows_are_read_wide(compiled):
    for name in ("norm1_quantize", "norm2_quantize", "gated_long_rows"):
        assert "ld.global.v4.b32" in compiled[name].ptx, name


def loop_of(ptx: str, instruction: str) -> str:
    """Returns the code from the label before the first such instruction to the jump back to it."""
    before, after = ptx[: ptx.index(instruction)], ptx[ptx.index(instruction) :]
    label = re.findall(r"^(\$L__BB\w+):", before, re.MULTILINE)[-1]
    return before[before.rindex(f"{label}:") :] + after[: after.rindex(label)]


def test_products_use_tensor_cores(compiled):
    """On sm_90, whole tiles of 64 rows use wgmma from shared memory; the others use mma."""
    kinds = {
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8": (
            "int8_large_residual",
            "int4_large",
            "fp4_large",
            "iq4_large",
            "minimums_large",
        ),
        "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32": (
            "int8_stream",
            "int8_stream_8",
            "int8_stream_89",
            "int8_large_80",
            "few_stream",
            "few_stream_long",
            "few_stream_80",
            "int4_stream",
            "nf4_stream_32",
            "fp4_stream_16",
            "minimums_stream",
        ),
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3": ("fp8_large",),
    }
    for instruction, names in kinds.items():
        for name in names:
            assert instruction in compiled[name].ptx, f"{name} without {instruction}"


def test_loops_only_copy_and_multiply(compiled):
    """Copies have 16 bytes, no load waits in the loop, and no thread writes to shared memory."""
    for name, one in compiled.items():
        if "stream" not in name and "large" not in name:
            continue
        loop = loop_of(one.ptx, "wgmma.mma" if "wgmma.mma" in one.ptx else "mma.sync")
        assert "cp.async.cg.shared.global" in loop and "bra" in loop, name
        assert "ld.global" not in loop and "st.shared" not in loop, name


def test_small_batch_rows_are_written_before_they_are_read(compiled):
    """Weights are requested first, and a barrier lies between a program's codes and their
    copies."""
    for name in ("few_stream", "few_stream_long", "few_stream_80"):
        ptx = compiled[name].ptx
        assert ptx.index("ld.volatile.global.b8") < ptx.index("ld.global.v4"), name
        stored, copied = ptx.rindex("st.global.v4.b32"), ptx.index("cp.async.cg")
        assert "bar.sync" in ptx[stored:copied], name


def test_tiles_share_an_sm(compiled):
    """Two programs of the square tile with a residual fit in registers and shared memory."""
    square = compiled["int8_square_residual"]
    assert square.registers * 256 * 2 <= 65536 and 2 * square.shared <= SHARED_LIMITS[90]
