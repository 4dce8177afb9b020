"""The interpreter that tests make faster computes the same bits and raises the same errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

KERNELS = """
import sys
import torch
import triton
import triton.language as tl

@triton.jit
def scaled(x, scale):
    return x * scale + tl.sum(x, 1)[:, None]

@triton.jit
def right(a, out, n, SIZE: tl.constexpr):
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    at, mask = row[:, None] * SIZE + tl.arange(0, SIZE)[None, :], row[:, None] < n
    x = tl.load(a + at, mask=mask, other=0)
    y = scaled(x.to(tl.bfloat16).to(tl.float32), 0.3)
    z = tl.dot(y, tl.trans(y), input_precision="ieee") + tl.cumsum(y, 0)
    z = tl.where(z > 0, z, (z * 100).to(tl.int32) % 7 + (row[:, None] << 3))
    tl.store(out + at, z, mask=mask)

@triton.jit
def shapes(a, out, n, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, SIZE), tl.arange(0, SIZE) + tl.arange(0, 2 * SIZE))

@triton.jit
def size(a, out, n, SIZE: tl.constexpr):
    tl.store(out + tl.arange(0, 3), 1)

@triton.jit
def pointers(a, out, n, SIZE: tl.constexpr):
    tl.store(out, a + out)

def results():
    for kernel in (right, shapes, size, pointers):
        a, out = torch.arange(48 * 16).sin().view(48, 16), torch.zeros(48, 16)
        try:
            kernel[(3,)](a, out, 41, SIZE=16)
            yield out.numpy().tobytes()
        except Exception as error:
            yield repr(error)

slow = list(results())
from tests.support.cuda import quick_interpreter
patch = triton.runtime.interpreter._patch_lang
quick_interpreter.quicken()
is_quick = triton.runtime.interpreter._patch_lang is not patch
assert is_quick == triton.__version__.startswith(quick_interpreter._KNOWN)
assert list(results()) == slow, "another result"
assert sum(isinstance(each, bytes) for each in slow) == 1, slow
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_results_and_errors_are_the_same(tmp_path: Path) -> None:
    script = tmp_path / "kernels.py"
    script.write_text(KERNELS)  # the interpreter reads a kernel's source
    root = str(Path(__file__).parents[3])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
