"""fp8 products with a scale for each 128 inputs as machine code.

Only the child process imports ops.triton_kernels, since this process may interpret the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cuda.triton_compile import SHARED_LIMITS, Case, Compiled, compile_module

pytestmark = pytest.mark.exhaustive


def case(name: str, arch: int, *, is_few: bool, is_grouped: bool = False, **switches) -> Case:
    from ops.triton_kernels import block_fp8

    tile = block_fp8.FEW if is_few else block_fp8.MANY
    sizes = ("N", "K", "x_stride", "residual_stride", "out_stride")
    table = "*i64" if is_grouped else None
    usual = {"GROUPED": is_grouped, "PER_ROW": 8 if is_grouped else 1, "BIAS": False, "ACT": 0}
    usual |= {"GATED": False, "RESIDUAL": False, "GROUP": block_fp8.GROUP}
    out = "*fp32" if "RESIDUAL" in switches else "*bf16"
    return Case(
        f"{name}_{arch}",
        block_fp8.block_kernel,
        {
            **{"x_at": "*fp8e4nv", "row_scales_at": "*fp32", "w_at": table or "*fp8e4nv"},
            **dict.fromkeys(("scales_at", "bias_at"), table or "*fp32"),
            **{"order_at": "*i32", "starts_at": "*i32", "residual_at": "*fp32", "out_at": out},
            **dict.fromkeys(("M", *sizes), "i32"),
        },
        {**usual, "BM": tile.m, "BN": tile.n, **switches},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        arch=arch,
        divisible=sizes,
        enable_fp_fusion=False,
    )


def compile_cases() -> Iterator[Case]:
    for arch in (89, 90):
        yield case("few", arch, is_few=True, ACT=1, GATED=True)
        yield case("many", arch, is_few=False, RESIDUAL=True, BIAS=True)
        yield case("experts_few", arch, is_few=True, is_grouped=True, ACT=1, GATED=True)
        yield case("experts_many", arch, is_few=False, is_grouped=True, BIAS=True)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return compile_module(__name__)


def test_all_fits_and_hardly_spills(compiled):
    assert len(compiled) == 8
    for name, one in compiled.items():
        limit = SHARED_LIMITS[int(name.rpartition("_")[2])]
        assert one.stack <= 16, f"{name}: {one.stack} bytes of stack"
        assert one.shared <= limit, f"{name}: {one.shared:,} bytes shared"


def test_products_of_fp8_and_wide_copies(compiled):
    for name, one in compiled.items():
        product = "wgmma.mma_async" if name.endswith("90") else "mma.sync"
        lines = [line for line in one.ptx.splitlines() if product in line]
        assert lines and all("e4m3" in line for line in lines), name
        assert "cp.async.cg.shared.global" in one.ptx, name
