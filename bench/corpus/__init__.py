"""The text the built-in model is trained and measured on, written by rules from a seed.

Pure Python: no tokenizer, no torch. `python -m bench.corpus` prints dialogs or the held-out text.
"""

from bench.corpus.dialogs import Dialog, Message, dialogs, heldout_text, mixed_requests, render

__all__ = ["Dialog", "Message", "dialogs", "heldout_text", "mixed_requests", "render"]
