"""The router's kernels as machine code.

Only the child process imports ops.triton_kernels, since this process may interpret the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cuda.triton_compile import SHARED_LIMITS, Case, Compiled, compile_module

pytestmark = pytest.mark.exhaustive


def logits_case(name: str, arch: int, weight: str = "*fp32", *, is_few: bool, slices=1) -> Case:
    from ops.triton_kernels import router

    tile = router._FEW if is_few else router._MANY
    sizes = dict.fromkeys(("M", "E", "K", "x_stride", "w_stride"), "i32")
    return Case(
        f"{name}_{arch}",
        router.logits_kernel,
        {"x_at": "*fp32", "w_at": weight, "sums_at": "*fp32", **sizes},
        {
            **{"SLICE": router.SLICE, "SLICES": slices, "EVEN_K": True},
            **{"BM": tile.m, "BN": tile.n, "BK": router.BLOCK_K},
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        arch=arch,
        divisible=("K", "x_stride", "w_stride"),
        enable_fp_fusion=False,
    )


def choose_case(name: str, arch: int, num_warps: int = 1, **switches) -> Case:
    from ops.triton_kernels.router import choose_kernel

    vectors = ("sums_at", "bias_at", "correction_at", "expert_scales_at", "weights_at")
    usual = {"TOP_K": 8, "SIGMOID": False, "AFTER": False, "NORMALIZED": True, "GROUPS": 1}
    usual |= {"TOP_GROUPS": 1, "BEST": 1, "BIAS": False, "CORRECTION": False, "SCALES": False}
    return Case(
        f"{name}_{arch}",
        choose_kernel,
        {
            **dict.fromkeys(vectors, "*fp32"),
            **{"experts_at": "*i32", "M": "i32", "E": "i32", "num_sums": "i32"},
            **{"sum_eps": "fp32", "scale": "fp32"},
        },
        {**usual, "GP": 1, "SP": 128, "KP": 8, **switches},
        num_warps=num_warps,
        arch=arch,
        divisible=("E",),
        enable_fp_fusion=False,
    )


def compile_cases() -> Iterator[Case]:
    groups = {"GROUPS": 8, "TOP_GROUPS": 4, "BEST": 2, "GP": 8, "SP": 32}
    after = {"TOP_K": 4, "AFTER": True, "BIAS": True, "NORMALIZED": False, "SP": 32, "KP": 4}
    for arch in (80, 89, 90):
        yield logits_case("few", arch, is_few=True)
        yield logits_case("few_bf16", arch, "*bf16", is_few=True)
        yield logits_case("many", arch, is_few=False, slices=4)
        yield choose_case("softmax", arch)
        yield choose_case("groups", arch, SIGMOID=True, CORRECTION=True, **groups)
        yield choose_case("after", arch, SCALES=True, **after)
        yield choose_case("most", arch, num_warps=8, SP=4096)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return compile_module(__name__)


def test_nothing_spills_and_all_fits(compiled):
    assert len(compiled) == 21
    for name, one in compiled.items():
        limit = SHARED_LIMITS[int(name.rpartition("_")[2])]
        assert one.stack == 0, f"{name}: {one.stack} bytes of stack"
        assert one.shared <= limit, f"{name}: {one.shared:,} bytes shared"


def test_logits_are_summed_in_fp32_and_copied_ahead(compiled):
    """The sums are no products of tensor cores, which round their factors."""
    for name, one in compiled.items():
        if name.startswith(("few", "many")):
            assert "mma" not in one.ptx and "fma.rn.f32" in one.ptx, name
            assert "cp.async" in one.ptx, name
