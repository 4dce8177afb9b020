"""Kernels of layers with a state as machine code.

Only the child process imports ops.triton_kernels, since this process may interpret the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cuda.triton_compile import SHARED_LIMITS, Case, Compiled, compile_module

pytestmark = pytest.mark.exhaustive

SEGMENTS = dict.fromkeys(("firsts_at", "sources_at", "targets_at", "sequences_at"), "*i64")


def conv_case(name: str, arch: int, rows: str = "*bf16", block: int = 16) -> Case:
    from ops.triton_kernels.state_rows import conv_kernel

    return Case(
        f"{name}_{arch}",
        conv_kernel,
        {
            **{"x_at": rows, "weight_at": "*fp32", "bias_at": "*fp32", "states_at": "i64"},
            **{"out_at": rows, **SEGMENTS},
            **dict.fromkeys(("x_stride", "record_stride", "num_channels"), "i32"),
        },
        {"WIDTH": 4, "ACT": 1, "BIAS": True, "BT": block, "BC": 64, "TAPS": 4},
        num_warps=4,
        arch=arch,
        divisible=("x_stride", "record_stride", "num_channels", "states_at"),
        enable_fp_fusion=False,
    )


def norm_case(name: str, arch: int, groups: int, pad: int, *, first: bool) -> Case:
    from ops.triton_kernels.state_rows import gated_norm_kernel

    return Case(
        f"{name}_{arch}",
        gated_norm_kernel,
        {
            **{"x_at": "*bf16", "gate_at": "*bf16", "weight_at": "*fp32", "out_at": "*bf16"},
            **dict.fromkeys(("x_stride", "gate_stride", "n", "group"), "i32"),
            "eps": "fp32",
        },
        {"SIGMOID": False, "NORM": True, "FIRST": first, "GROUPS": groups, "GROUP_PAD": pad},
        num_warps=max(1, min(16, groups * pad // 512)),
        arch=arch,
        divisible=("x_stride", "gate_stride", "n", "group"),
    )


OPERANDS = ("q_at", "k_at", "v_at", "a_at")
VECTORS = ("rates_at", "bias_at")
STRIDES = ("q_stride", "k_stride", "v_stride", "a_stride")
SCALARS = ("scale", "beta_scale", "dt_min", "dt_max")


def rule_case(name: str, arch: int, rows: str = "*bf16", dims: int = 128, **switches) -> Case:
    from ops.triton_kernels.state_rule import _STATE_BLOCK, rule_kernel

    usual = {"DELTA": True, "UNIT": True, "BY_DIM": False, "SKIP": False}
    usual |= {"HEADS": 32, "KEY_HEADS": 16, "DK": dims, "DK_PAD": dims, "DV": 128}
    usual |= {"BV": _STATE_BLOCK // dims, **switches}
    absent = {} if usual["SKIP"] else {"skip_at": None}
    absent |= {} if usual["DELTA"] else {"b_at": None}
    signature = {
        **dict.fromkeys(OPERANDS, rows),
        **dict.fromkeys(VECTORS, "*fp32"),
        **{"skip_at": "*fp32", "b_at": rows, "out_at": rows, **SEGMENTS, "states_at": "i64"},
        **dict.fromkeys((*STRIDES, "b_stride", "record_stride", "long_rows"), "i32"),
        **dict.fromkeys(SCALARS, "fp32"),
    }
    return Case(
        f"{name}_{arch}",
        rule_kernel,
        {key: kind for key, kind in signature.items() if key not in absent},
        usual | absent,
        num_warps=1,
        arch=arch,
        divisible=("q_stride", "k_stride", "v_stride", "record_stride", "states_at"),
    )


def chunk_case(name: str, arch: int, rows: str = "*bf16", **switches) -> Case:
    from ops.triton_kernels.state_chunks import _VALUES, chunks_kernel

    usual = {"DELTA": True, "SKIP": False, "HEADS": 32, "KEY_HEADS": 16}
    usual |= {"DK": 128, "DK_PAD": 128, "DV": 128, "BV": _VALUES, **switches}
    absent = {} if usual["SKIP"] else {"skip_at": None}
    signature = {
        **dict.fromkeys(("q_at", "k_at", "v_at", "out_at"), rows),
        **{"skip_at": "*fp32", "scores_at": "*bf16", "inverses_at": "*bf16"},
        **{"factors_at": "*fp32", "states_at": "i64", **SEGMENTS},
        **dict.fromkeys((*STRIDES[:3], "record_stride", "long_rows"), "i32"),
    }
    return Case(
        f"{name}_{arch}",
        chunks_kernel,
        {key: kind for key, kind in signature.items() if key not in absent},
        usual | absent,
        num_stages=2,
        arch=arch,
        divisible=("q_stride", "k_stride", "v_stride", "record_stride", "states_at"),
    )


def prepare_case(name: str, arch: int, rows: str = "*bf16", **switches) -> Case:
    from ops.triton_kernels.state_chunks import prepare_kernel

    usual = {"DELTA": True, "UNIT": True, "HEADS": 32, "KEY_HEADS": 16}
    usual |= {"DK": 128, "BK": 32, **switches}
    absent = {} if usual["DELTA"] else {"b_at": None}
    signature = {
        **dict.fromkeys(("q_at", "k_at", "a_at", "b_at"), rows),
        **dict.fromkeys(("rates_at", "bias_at"), "*fp32"),
        **dict.fromkeys(("chunks_at", "num_chunks_at"), "*i64"),
        **{"scores_at": "*bf16", "inverses_at": "*bf16", "factors_at": "*fp32"},
        **dict.fromkeys((*STRIDES[:2], "a_stride", "b_stride", "num_slots"), "i32"),
        **dict.fromkeys(SCALARS, "fp32"),
    }
    return Case(
        f"{name}_{arch}",
        prepare_kernel,
        {key: kind for key, kind in signature.items() if key not in absent},
        usual | absent,
        num_warps=8,
        arch=arch,
        divisible=("q_stride", "k_stride"),
    )


def plan_case(name: str, arch: int) -> Case:
    from ops.triton_kernels.state_chunks import plan_kernel

    sizes = ("num_sequences", "num_slots", "long_rows")
    pointers = ("firsts_at", "sequences_at", "chunks_at", "num_chunks_at")
    return Case(
        f"{name}_{arch}",
        plan_kernel,
        {**dict.fromkeys(pointers, "*i64"), **dict.fromkeys(sizes, "i32")},
        {"SEGMENTS": 256, "SEQUENCES": 16},
        arch=arch,
    )


def compile_cases() -> Iterator[Case]:
    mamba = {"DELTA": False, "UNIT": False, "SKIP": True, "KEY_HEADS": 8, "DV": 64}
    for arch in (80, 89, 90):
        yield conv_case("conv", arch)
        yield conv_case("conv_one", arch, block=1)
        yield conv_case("conv_wide", arch, "*fp32")
        yield norm_case("norm_heads", arch, 32, 128, first=False)
        yield norm_case("norm_row", arch, 1, 8192, first=True)
        yield rule_case("delta", arch)
        yield rule_case("delta_wide", arch, "*fp32", 256)
        yield rule_case("kimi", arch, BY_DIM=True)
        yield rule_case("mamba", arch, **mamba)
        yield plan_case("plan", arch)
        yield prepare_case("prepare_delta", arch)
        yield prepare_case("prepare_mamba", arch, DELTA=False, UNIT=False, KEY_HEADS=8)
        yield chunk_case("chunks_delta", arch)
        yield chunk_case("chunks_mamba", arch, DELTA=False, SKIP=True, KEY_HEADS=8, DV=64)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return compile_module(__name__)


def test_products_of_chunks_are_those_of_tensor_cores(compiled):
    for name, one in compiled.items():
        if name.startswith(("prepare", "chunks")):
            product = "wgmma.mma_async" if name.endswith("_90") else "mma.sync"
            assert f"{product}.sync.aligned" in one.ptx or f"{product}.aligned" in one.ptx, name
            assert "bf16.bf16" in one.ptx, name


def test_nothing_spills_and_all_fits(compiled):
    assert len(compiled) == 42
    for name, one in compiled.items():
        limit = SHARED_LIMITS[int(name.rpartition("_")[2])]
        # two registers are nothing beside the products of a chunk
        spilled = 8 if name.startswith("chunks") else 0
        assert one.stack <= spilled, f"{name}: {one.stack} bytes of stack"
        assert one.shared <= limit, f"{name}: {one.shared:,} bytes shared"
