"""The architectures of GGUF files that are served.

Each row has a test that writes a small model as llama.cpp's conversion does and compares it with
the original (tests/whole/test_gguf.py). Nothing is guessed: other architectures are refused, and so
is a key that a row does not read.
"""

from __future__ import annotations

from serve.models.gguf import dense, gemma4, latent, mixtures
from serve.models.gguf.architecture import Architecture
from serve.models.gguf.keys import Keys

ARCHITECTURES = (
    dense.ARCHITECTURES | mixtures.ARCHITECTURES | latent.ARCHITECTURES | gemma4.ARCHITECTURES
)


def find_architecture(keys: Keys) -> Architecture:
    """Returns the row of a file. ModelLoadError names those that are served."""
    found = ARCHITECTURES.get(keys.architecture)
    if found is None:
        raise keys.fail(
            "general.architecture",
            f"{keys.architecture!r:.60} is not supported; known: {', '.join(ARCHITECTURES)}",
        )
    return found
