"""`python -m tests.fuzz.guided TARGET SECONDS`: fuzzes by libFuzzer, which ends this process.

It is a module of its own because atheris must instrument the imports of the fuzzed code.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["serve", "memory", "quant"]):
    from bench.soak.mutate import MAX_INPUT
    from tests.fuzz.targets import TARGETS

CORPUS = Path("build/fuzz")


def main(name: str, seconds: str) -> None:
    """Fuzzes a target; the corpus is kept in build/fuzz/NAME."""
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(TARGETS[name].seeds):
        (folder / f"seed-{number}").write_bytes(data)
    options = [f"-max_total_time={int(float(seconds))}", f"-max_len={MAX_INPUT}"]
    options += ["-rss_limit_mb=4096", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, str(folder)], TARGETS[name].run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
