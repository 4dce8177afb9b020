"""Triton kernels compiled ahead of time for GPUs that are not present.

TRITON_INTERPRET=1 disables compilation, so a test module's cases are compiled in one child process:
the module has a function `compile_cases()` that yields Cases, and its tests read
`compile_module(__name__)`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# Largest shared memory of a program, bytes.
SHARED_LIMITS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}


@dataclass(frozen=True)
class Case:
    """A kernel and everything that determines its code.

    signature: types of the arguments that are not in constexprs ("*i8", "*bf16", "*fp32", "i32",
    ...). Pointers and the arguments in `divisible` are multiples of 16. arch: 80, 89 or 90.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    arch: int = 90
    divisible: tuple[str, ...] = ()
    enable_fp_fusion: bool = True
    max_registers: int | None = None


class Compiled(NamedTuple):
    """shared: bytes. registers and stack (bytes; more than 0 means spills) are those of a
    thread."""

    ptx: str
    shared: int
    registers: int
    stack: int
    cubin: str
    """Its path."""


def compile_case(case: Case, folder: Path) -> Compiled:
    """Compiles a case, not under TRITON_INTERPRET=1, and leaves the cubin in folder."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    unknown = (set(case.signature) | set(case.constexprs)) ^ set(names)
    assert not unknown, f"{case.name}: arguments without a type, or types without one: {unknown}"
    kinds = {name: case.signature.get(name, "constexpr") for name in names}
    constants = {(i,): case.constexprs[n] for i, n in enumerate(names) if n in case.constexprs}
    whole = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if kinds[n].startswith("*") or n in case.divisible
    }
    source = ASTSource(fn=case.kernel, signature=kinds, constexprs=constants, attrs=whole)
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "enable_fp_fusion": case.enable_fp_fusion,
        "maxnreg": case.max_registers,
    }
    built = triton.compile(source, target=GPUTarget("cuda", case.arch, 32), options=options)
    cubin = folder / f"{case.name}.cubin"
    cubin.write_bytes(built.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))
    return Compiled(built.asm["ptx"], built.metadata.shared, registers, stack, str(cubin))


def compile_module(module: str, timeout_s: float = 300) -> dict[str, Compiled]:
    """Compiles all Cases of a module's compile_cases() in a child process; returns them by name."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        env["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")
        name = "tests." + module.removeprefix("tests.")
        command = [sys.executable, "-m", "tests.support.cuda.triton_compile", name, folder]
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
        assert child.returncode == 0, child.stderr[-4000:]
        found = json.loads((Path(folder) / "compiled.json").read_text())
    return {name: Compiled(**each) for name, each in found.items()}


def _main(module: str, folder: str) -> None:
    cases = importlib.import_module(module).compile_cases()
    found = {case.name: compile_case(case, Path(folder))._asdict() for case in cases}
    (Path(folder) / "compiled.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
