"""The kernels of device-side sampling compile for GPUs, without spills and with wide loads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("triton")

from ops.triton_kernels import logits, sample_token, sampling
from ops.triton_kernels.sampling import EDGES, Config
from tests.support.cuda.triton_compile import SHARED_LIMITS, Case, compile_module

pytestmark = pytest.mark.exhaustive

ARCHS = (80, 90)
CONFIG = Config()
TYPES = {
    "logits": "*fp32",
    "maxima": "*fp32",
    "values": "*fp32",
    "edit_values": "*fp32",
    "logprobs": "*fp32",
    "top_logprobs": "*fp32",
    "masses": "*i64",
    "given": "*i64",
    "slots": "*i64",
    **dict.fromkeys(
        ["stride", "size", "num_chunks", "counts_stride", "num_top", "num_words"], "i32"
    ),
}
CONSTANTS = {
    "CHUNK": CONFIG.chunk,
    "CHUNKS": 32,  # a vocabulary of 128k
    "EDGES": EDGES,
    "CAPACITY": CONFIG.capacity,
    "BLOCK": CONFIG.block,
    "EDIT_BLOCK": 256,
    "TOP": 32,
}
KERNELS = [
    ("max", sampling.chunk_max_kernel, CONFIG.warps),
    ("mask", logits.mask_kernel, CONFIG.warps),
    ("best", sampling.best_kernel, 1),
    ("adjust", sampling.adjust_kernel, CONFIG.warps),
    ("sums", sampling.chunk_sums_kernel, CONFIG.warps),
    ("gather", sampling.gather_kernel, CONFIG.warps),
    ("sample", sample_token.sample_kernel, CONFIG.sample_warps),
    ("rank", logits.chunk_rank_kernel, CONFIG.warps),
    ("describe", logits.describe_kernel, 1),
    ("input_ids", sampling.input_ids_kernel, 4),
]


def compile_cases() -> Iterator[Case]:
    for name, kernel, warps in KERNELS:
        types = {**TYPES, "ids": "*i64"} if name == "input_ids" else TYPES
        constants = {**CONSTANTS, "BLOCK": 256} if name == "input_ids" else CONSTANTS
        for arch in ARCHS:
            yield Case(
                f"{name}_{arch}",
                kernel,
                {n: types.get(n, "*i32") for n in kernel.arg_names if n not in constants},
                {n: constants[n] for n in kernel.arg_names if n in constants},
                num_warps=warps,
                arch=arch,
                divisible=("stride", "size", "counts_stride"),
            )


@pytest.fixture(scope="module")
def compiled():
    return compile_module(__name__)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", [name for name, _, _ in KERNELS])
def test_nothing_spills(compiled, name, arch):
    found = compiled[f"{name}_{arch}"]
    assert found.stack == 0
    assert found.shared <= SHARED_LIMITS[arch]


@pytest.mark.parametrize("name", ["max", "sums", "adjust", "gather", "rank"])
def test_logits_are_loaded_sixteen_bytes_at_a_time(compiled, name):
    assert "ld.global.v4.b32" in compiled[f"{name}_90"].ptx


@pytest.mark.parametrize("name", ["sums", "sample"])
def test_scaled_logits_are_rounded_as_on_the_cpu(compiled, name):
    ptx = compiled[f"{name}_90"].ptx
    assert "div.rn.f32" in ptx
    assert "div.full.f32" not in ptx
    assert "div.approx" not in ptx
