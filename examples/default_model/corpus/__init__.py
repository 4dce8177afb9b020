"""Generates the text on which the built-in model is trained and measured, by rules from a seed.

The package is pure Python without a tokenizer or torch. Its entry point is dialogs.py, which mixes
the turns of the other modules. `python -m examples.default_model.corpus` prints dialogs and writes
the files of bench/data.
"""

from examples.default_model.corpus.dialogs import (
    Dialog,
    Message,
    dialogs,
    frozen_requests,
    heldout_text,
    mixed_requests,
    render,
)

__all__ = [
    "Dialog",
    "Message",
    "dialogs",
    "frozen_requests",
    "heldout_text",
    "mixed_requests",
    "render",
]
