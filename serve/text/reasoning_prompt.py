"""Finds out whether a prompt ends inside the model's reasoning."""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve.text.chat_parser.syntax.format_types import ReasoningFormat
from serve.text.tokenizer import Tokenizer

TAIL_TOKENS = 32  # more than two markers have
_LAST_TAG = re.compile(r"<[^<>\s]{1,64}>\Z")


def is_reasoning_open(
    tokenizer: Tokenizer, style: ReasoningFormat, prompt_token_ids: Sequence[int]
) -> bool:
    """Returns whether the prompt ends with the marker that begins the reasoning. Another tag may
    follow it at once, as Seed-OSS's <seed:cot_budget_reflect>."""
    tail = list(prompt_token_ids[-TAIL_TOKENS:])
    text = tokenizer.decode(tail, skip_special_tokens=False).rstrip()
    tag = _LAST_TAG.search(text)
    if tag is not None and tag[0] not in style.ends:
        text = text if text.endswith(style.begin) else text[: tag.start()]
    return text.endswith(style.begin)
