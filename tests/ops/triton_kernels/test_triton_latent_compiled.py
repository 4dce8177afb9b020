"""The kernels of latent attention as machine code.

Only the child process imports ops.triton_kernels, since this process may interpret the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.cuda.triton_compile import SHARED_LIMITS, Case, Compiled, compile_module

pytestmark = pytest.mark.exhaustive

NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
# name: heads, type of the latents, scale groups, type of the queries
KINDS = {
    "int8": (16, torch.int8, (64, 64), torch.bfloat16),
    "many": (128, torch.int8, (64, 64), torch.bfloat16),
    "bf16": (20, torch.bfloat16, (None, None), torch.bfloat16),
    "fp32": (16, torch.float32, (None, None), torch.float32),
}


def attention_cases(name: str, arch: int) -> Iterator[Case]:
    from ops.triton_kernels import latent
    from ops.triton_kernels.latent_tiles import LatentTiles

    heads, kind, groups, of_q = KINDS[name]
    tiles = LatentTiles(heads, 512, 64, 0.07, kind, *groups, 1 << 20, 0)
    q = f"*{NAMES[of_q]}"
    common = {"q": q, "q_stride": "i32", "anchor": "*i32", "distance": "i64", "starts": "*i64"}
    constants = latent.constants(tiles, of_q)
    for is_prefill in (False, True):
        config = latent.config(tiles, of_q, arch, is_prefill=is_prefill)
        own = {x: y for x, y in config.constants.items() if x != "num_stages"}
        if is_prefill:
            kernel = latent.prefill_kernel
            types = {"sequences": "*i32", "tile_list": "*i32", "num_tiles": "*i32"}
            types |= {"out": q, "out_stride": "i32", "lse": "*fp32"}
            own |= {"TILE_ROWS": latent.tile_rows(heads), "HAS_LSE": arch == 90}
        else:
            kernel = latent.decode_kernel
            types = {"items": "*i32", "num_items": "*i32", "outs": "*fp32", "lses": "*fp32"}
        yield Case(
            f"{'prefill' if is_prefill else 'decode'}_{name}_{arch}",
            kernel,
            {**common, **types, "scale": "fp32"},
            constants | own,
            num_warps=config.num_warps,
            num_stages=config.constants["num_stages"],
            arch=arch,
            divisible=("q_stride", "distance", *(["out_stride"] if is_prefill else [])),
        )


def append_case(arch: int) -> Case:
    from ops.triton_kernels.latent_tiles import LatentTiles, append_kernel, latent_constants

    tiles = LatentTiles(16, 512, 64, 0.07, torch.int8, 64, 64, 1 << 20, 0)
    types = {"k": "*bf16", "k_stride": "i32", "cos": "*fp32", "sin": "*fp32", "rows": "*i64"}
    return Case(
        f"append_{arch}",
        append_kernel,
        types | {"anchor": "*i64", "distance": "i64"},
        {"HALF": 32, **latent_constants(tiles)},
        arch=arch,
        divisible=("k_stride", "distance"),
    )


def compile_cases() -> Iterator[Case]:
    for arch in (80, 89, 90):
        for name in KINDS:
            yield from attention_cases(name, arch)
        yield append_case(arch)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return compile_module(__name__)


def test_all_fits_and_hardly_spills(compiled):
    assert len(compiled) == 27
    for name, one in compiled.items():
        limit = SHARED_LIMITS[int(name.rpartition("_")[2])]
        assert one.shared <= limit, f"{name}: {one.shared:,} bytes shared"
        # fp32 serves comparison only
        allowed = 1024 if "fp32" in name else 48
        assert one.stack <= allowed, f"{name}: {one.stack} bytes of stack"


def test_products_use_tensor_cores(compiled):
    for name, one in compiled.items():
        if "append" not in name and "fp32" not in name:
            assert "mma.sync" in one.ptx or "wgmma.mma_async" in one.ptx, name
