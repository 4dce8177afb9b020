"""Finds out whether a prompt ends inside the model's reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from serve.text.chat_parser.syntax.format_types import ReasoningFormat
from serve.text.tokenizer import Tokenizer

TAIL_TOKENS = 16  # more than a marker has


def is_reasoning_open(
    tokenizer: Tokenizer, style: ReasoningFormat, prompt_token_ids: Sequence[int]
) -> bool:
    """Returns whether the prompt ends with the marker that begins the reasoning."""
    tail = list(prompt_token_ids[-TAIL_TOKENS:])
    return tokenizer.decode(tail, skip_special_tokens=False).rstrip().endswith(style.begin)
