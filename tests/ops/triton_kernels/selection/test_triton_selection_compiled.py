"""The kernels that select K/V compile for GPUs that are not present: they fit, do not spill and
load wide."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from ops.kv_tiles import KVTiles, key_bounds_bytes, layer_bytes
from tests.support.cuda.triton_compile import SHARED_LIMITS, Case, Compiled, compile_module

pytestmark = pytest.mark.exhaustive

BF16, INT8 = torch.bfloat16, torch.int8
# heads per K/V head, dim, type, group
LAYERS = {"int8": (4, 128, INT8, 64), "bf16": (4, 128, BF16, None), "int8_80": (1, 80, INT8, 40)}
ARCHES = (80, 89, 90)
TILES = 8192  # of a sequence


def compile_cases() -> Iterator[Case]:
    from ops.triton_kernels import decode
    from ops.triton_kernels.selection import bounds, choice, scores
    from ops.triton_kernels.tiles import TYPES

    for name, (shared, dim, dtype, group) in LAYERS.items():
        size = layer_bytes(8, dim, dtype, group)
        stride = 32 * (size + key_bounds_bytes(8, dim))
        tiles = KVTiles(8 * shared, 8, dim, 0.1, None, dtype, group, stride, 0)
        for arch in ARCHES:
            config = decode.config(tiles, BF16, arch, has_tables=True)
            yield Case(
                f"decode_{name}_{arch}",
                decode.decode_kernel,
                {"q": "*bf16", "q_stride": "i32", "anchor": "*i32", "distance": "i64"}
                | {"starts": "*i64", "items": "*i32", "num_items": "*i32", "outs": "*fp32"}
                | {"lses": "*fp32", "tables": "*i32", "scale": "fp32"},
                decode.constants(tiles, BF16, TILES) | config.constants,
                config.num_warps,
                max_registers=config.max_registers,
                arch=arch,
                divisible=("q_stride", "distance"),
            )
            yield Case(
                f"scores_{name}_{arch}",
                scores.scores_kernel,
                {"q": "*bf16", "q_stride": "i32", "anchor": "*i32", "distance": "i64"}
                | {"starts": "*i64", "choices": "*i32", "num_choices": "*i32", "orders": "*i32"},
                scores.constants(tiles, TILES),
                arch=arch,
                divisible=("q_stride", "distance"),
            )
        yield Case(
            f"bounds_{name}_90",
            bounds.bounds_kernel,
            {"rows": "*i64", "anchor": "*i64", "distance": "i64"},
            bounds.constants(tiles) | {"NUM_GROUPS": tiles.num_groups, "TYPE": TYPES[dtype]},
            num_warps=1,
            divisible=("distance",),
        )
    for pad in (128, TILES, choice.MAX_TILES):
        yield Case(
            f"choose_{pad}_90",
            choice.choose_kernel,
            {"choices": "*i32", "num_choices": "*i32", "orders": "*i32"},
            {"STRIDE": pad, "KV_HEADS": 8, "PAD": pad},
            num_warps=choice.num_warps(pad),
        )


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return compile_module(__name__)


def test_all_kernels_fit_and_do_not_spill(compiled):
    assert len(compiled) == 2 * len(LAYERS) * len(ARCHES) + len(LAYERS) + 3
    for name, found in compiled.items():
        limit = SHARED_LIMITS[int(name.rsplit("_", 1)[-1])]
        assert found.shared <= limit, f"{name}: {found.shared} bytes of shared memory"
        # contexts of half a million tokens are rare, and their orders stay in the first cache
        allowed = 512 if name.startswith("choose_32768") else 0
        assert found.stack <= allowed, f"{name}: {found.stack} bytes of stack"


@pytest.mark.parametrize("name", ["int8", "bf16"])
def test_chosen_tiles_are_copied_16_bytes_at_a_time(compiled, name):
    ptx = compiled[f"decode_{name}_90"].ptx
    copies = Counter(re.findall(r"cp\.async\.c\w\.shared\.global .*, (0x\w+)", ptx))
    size = 2 if name == "bf16" else 1
    assert copies["0x10"] == 3 * 2 * 64 * 128 * size // 16 // 128
    assert "mma.sync" in ptx
    assert not re.search(r"ld\.(global|shared)\.\w*8 ", ptx)


def test_decode_leaves_room_for_three_programs_on_an_sm(compiled):
    found = compiled["decode_int8_90"]
    assert 3 * (found.shared + 1024) <= SHARED_LIMITS[90] + 1024, found.shared
    assert 3 * 128 * found.registers <= 65536, found.registers


def test_bounds_are_read_16_bytes_at_a_time(compiled):
    for name in ("int8", "bf16"):
        ptx = compiled[f"scores_{name}_90"].ptx
        assert re.search(r"(ld\.global\.\w*v4\.b32|ld\.global\.v2\.b64|cp\.async\.cg)", ptx), name
        assert not re.search(r"ld\.global\.\w*\.?[bus]8 ", ptx), name
