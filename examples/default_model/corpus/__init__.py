"""The text on which the built-in model is trained and measured, written by rules from a seed.

The package is pure Python and knows neither a tokenizer nor torch. Begin with dialogs.py, which
mixes the other modules' turns. `python -m examples.default_model.corpus` prints dialogs and
writes the files of bench/data.
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
