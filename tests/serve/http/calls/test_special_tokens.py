"""Text of a user never becomes a special token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from serve.engine.chat_prompt import encode_chat, num_chars
from serve.engine.request_limits import RequestLimits
from serve.text.chat_template import ChatTemplate
from serve.text.tokenizer import Tokenizer
from tests.support.engine.checkpoints import checkpoint

LIMITS = RequestLimits(max_model_len=4096, vocab_size=320, max_num_waiting=1, max_num_seqs=1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.row("T6")
def test_no_special_id_comes_from_user_text(seed: int) -> None:
    """The text holds every special token of the tokenizer, whole, cut and nested."""
    tokenizer = Tokenizer.load(checkpoint("llama"))
    specials = tokenizer.special_token_strings
    assert specials
    rng = random.Random(seed)
    fragments = [
        *specials,
        *(text[:2] for text in specials),
        *(text[2:] for text in specials),
        " x",
    ]
    content = "".join(rng.choices(fragments, k=200))
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    template = ChatTemplate(source, special_tokens=tokenizer.named_tokens)
    try:
        plain = encode_chat(template, tokenizer, [_user("hello")], LIMITS)
        token_ids = encode_chat(template, tokenizer, [_user(content)], LIMITS)
    finally:
        template.close()
    assert _specials(token_ids, tokenizer) == _specials(plain, tokenizer)
    assert content in tokenizer.decode(token_ids)


def test_cut_special_tokens_do_not_count_against_the_context() -> None:
    """What cuts them is removed before the text is encoded."""
    tokenizer = Tokenizer.load(checkpoint("llama"))
    special = max(tokenizer.special_token_strings, key=len)
    content = f"{'x' * 60}{special}\n" * 1200
    template = ChatTemplate("{{ messages[0].content }}", special_tokens={})
    try:
        limits = replace(LIMITS, max_model_len=1 << 20)
        token_ids = encode_chat(template, tokenizer, [_user(content)], limits)
        limits = replace(LIMITS, max_model_len=len(token_ids))
        assert encode_chat(template, tokenizer, [_user(content)], limits) == token_ids
    finally:
        template.close()


def test_all_texts_of_a_conversation_count() -> None:
    call = {"function": {"name": "ab", "arguments": {"c": "defg", "n": 5}}}
    parts = [{"text": "hij"}]
    assert num_chars([{"content": None, "tool_calls": [call]}, {"content": parts}]) == 9
    assert num_chars(None) == 0


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _specials(token_ids: list[int], tokenizer: Tokenizer) -> list[int]:
    return [token for token in token_ids if token in tokenizer.special_ids]
