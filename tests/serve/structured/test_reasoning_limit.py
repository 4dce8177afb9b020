"""The limit of a model's reasoning: which tokens are forced, and when."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from serve.structured.reasoning_limit import ReasoningEnd, ReasoningLimit, ReasoningLimits
from serve.structured.token_mask import SequenceMask, bits_of
from serve.text.chat_parser import ChatFormat
from serve.text.chat_parser.formats import REASONING_FORMATS
from serve.text.reasoning_prompt import is_reasoning_open

THINK = REASONING_FORMATS["deepseek_r1"]
MESSAGE = "So far."
# </think> is one token of these
CLOSING = b"\n\nSo far.\n</think>\n\n"
ABRUPT = b"\n</think>\n\n"


def bytes_tokenizer(*, pieces: bool = True) -> Any:
    """One token for each byte, and the whole marker </think> as token 256."""
    table = [bytes([value]) for value in range(256)] + [b"</think>"]

    def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
        before, marker, after = text.partition("</think>")
        return [*before.encode(), *([256] if marker else []), *after.encode()]

    def decode(token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return b"".join(table[token] for token in token_ids).decode(errors="replace")

    return SimpleNamespace(pieces=table if pieces else None, encode=encode, decode=decode)


def limits(message: str = MESSAGE, name: str = "deepseek_r1", **kwargs: Any) -> ReasoningLimits:
    style = ChatFormat(reasoning=REASONING_FORMATS[name])
    return ReasoningLimits(bytes_tokenizer(**kwargs), ReasoningEnd(style, message))


def forced_after(limit: ReasoningLimit, output: list[int]) -> int | None:
    return limit.forced([7, *output], 1, 1 + len(output))


def observe(limit: ReasoningLimit, output: list[int]) -> None:
    limit.observe([7, *output], 1, 1 + len(output))


def written(limit: ReasoningLimit, model: bytes | list[int], size: int) -> bytes:
    """Returns the text of `size` tokens. The model writes its tokens one after the other, but for
    those that are forced."""
    own, output = iter(model), []
    while len(output) < size:
        observe(limit, output)
        token = forced_after(limit, output) if limit.may_force(len(output)) else None
        output.append(next(own) if token is None else token)
    return b"".join(bytes_tokenizer().pieces[token] for token in output)


def test_the_end_is_forced_at_the_bound() -> None:
    text = written(limits().make(5, is_open=True), b"abcdefghijklmn", 5 + 13 + 4)
    assert text == b"abcde" + CLOSING + b"fghi"


def test_the_marker_at_the_start_does_not_count() -> None:
    made = limits().make(3, is_open=False)
    text = written(made, b"\n<think>abcdefgh", 11 + 13 + 3)
    assert text == b"\n<think>abc" + CLOSING + b"def"


def test_a_call_ends_the_reasoning() -> None:
    """Nothing is forced into a call that the model makes without ending its reasoning first."""
    style = ChatFormat(reasoning=THINK, call_begins=("<tool_call>",))
    made = ReasoningLimits(bytes_tokenizer(), ReasoningEnd(style, MESSAGE))
    call = b'hm\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    assert written(made.make(50, is_open=True), call, len(call)) == call
    mention = b"a <tool_call> is none of mine"
    text = written(made.make(20, is_open=True), mention, 20 + 13 + 9)
    assert text == mention[:20] + CLOSING + mention[20:]


def test_no_reasoning() -> None:
    """A bound of 0 ends reasoning where it begins, without the sentence."""
    opened = limits().make(0, is_open=True)
    assert written(opened, b"answer", 10) == b"\n</think>\n\nanswer"
    begun = limits().make(0, is_open=False)
    assert written(begun, b"<think>answer", 17) == b"<think>" + ABRUPT + b"answer"
    without = limits().make(0, is_open=False)
    assert written(without, b"<b>answer <think>", 17) == b"<b>answer <think>"
    assert not without.may_force(3)


@pytest.mark.parametrize("pieces", [True, False])
def test_reasoning_that_ends_by_itself_is_left_alone(pieces: bool) -> None:
    for end in ([256], list(b"</think>")):  # as a special token and as text
        made = limits(pieces=pieces).make(6, is_open=True)
        model = [*b"ab", *end, *b"the answer is <think> long enough"]
        text = written(made, model, 30)
        assert text.startswith(b"ab</think>the answer is <thi")
        assert not made.may_force(30)


def test_the_models_own_end_is_completed() -> None:
    """An end marker of several tokens that the bound would cut is the model's own end."""
    made = limits("").make(4, is_open=True)
    assert written(made, b"ab</think>answer", 16) == b"ab</think>answer"
    other = limits("").make(4, is_open=True)
    assert written(other, b"ab</thanks", 14) == b"ab</tha" + ABRUPT + b"nks"
    never = limits("").make(4, is_open=True)
    assert written(never, b"ab<<<<<<<<<<<<", 16) == b"ab" + b"<" * 10 + ABRUPT


@pytest.mark.parametrize("pieces", [True, False])
def test_a_character_is_not_cut(pieces: bool) -> None:
    made = limits("", pieces=pieces).make(2, is_open=True)
    assert written(made, "a\N{THUMBS UP SIGN}bcd".encode(), 9) == (
        "a\N{THUMBS UP SIGN}".encode() + ABRUPT
    )
    broken = limits("", pieces=pieces).make(2, is_open=True)
    model = [ord("a"), *[0xF0] * 20]  # never whole
    assert written(broken, model, 14) == bytes(model[:10]) + ABRUPT


def test_what_is_forced_is_a_function_of_the_tokens() -> None:
    """A limit that sees tokens removed and replaced forces what a new one does."""
    rng = random.Random(3)
    made = limits()
    changed = made.make(8, is_open=False)
    output: list[int] = []
    alphabet = [*b"<think>ab \n", 256]
    for _ in range(3000):
        token = forced_after(changed, output) if changed.may_force(len(output)) else None
        fresh = made.make(8, is_open=False)
        assert forced_after(fresh, output) == (forced_after(changed, output))
        if token is None:
            token = rng.choice(alphabet) if len(output) > 6 else b"<think>"[len(output)]
        output.append(token)
        if rng.random() < 0.2:
            del output[max(0, len(output) - rng.randrange(1, 12)) :]
        if len(output) > 60:
            output = []
        observe(changed, output)


def test_the_mask_allows_the_forced_token_only() -> None:
    """It is allowed beside allowed_token_ids, bad words and a minimum of tokens."""
    made = limits("")
    mask = SequenceMask(
        300,
        num_prompt=2,
        allowed=bits_of([65, 66], 300),
        stop_ids=frozenset({256}),
        min_output=50,
        reasoning=made.make(1, is_open=True),
    )
    output: list[int] = []
    for expected in ([65, 66], [10], [256], [10], [10], [65, 66]):
        assert mask.is_needed(2 + len(output))
        mask.fill([1, 2, *output])
        found = [token for token in range(300) if mask.bits[token >> 5] >> (token & 31) & 1]
        assert found == expected
        output.append(found[0])
        assert mask.ending([1, 2, *output]) is None


def test_a_mask_is_needed_only_where_a_token_may_be_forced() -> None:
    made = limits("")
    mask = SequenceMask(300, num_prompt=2, reasoning=made.make(3, is_open=True))
    output: list[int] = []
    needed = []
    for token in (*b"abcd", *ABRUPT[:1], 256, 10, 10, *b"answer"):
        needed.append(mask.is_needed(2 + len(output)))
        if needed[-1]:
            mask.fill([1, 2, *output])
            forced = [t for t in range(300) if mask.bits[t >> 5] >> (t & 31) & 1]
            token = forced[0] if len(forced) == 1 else token
        output.append(token)
        mask.ending([1, 2, *output])
    assert needed == [False] * 3 + [True] * 4 + [False] * 7


def test_a_prompt_that_ends_inside_the_reasoning() -> None:
    tokenizer = bytes_tokenizer()
    assert is_reasoning_open(tokenizer, THINK, list(b"question<think>\n"))
    assert not is_reasoning_open(tokenizer, THINK, list(b"<think>\n</think>\n"))


GRANITE_END = b"\nHere is my response:\n\n"
ANALYSIS = b"<|channel|>analysis<|message|>"
FINAL = b"<|channel|>final<|message|>"
HARMONY_END = b"\n<|end|><|start|>assistant"


def test_a_format_with_several_markers() -> None:
    text = b"Here's my thought process:abc"
    answer = written(limits("", "granite").make(3, is_open=False), text + b"defg", 29 + 23 + 4)
    assert answer == text + GRANITE_END + b"defg"
    own = b"Here is my thought process:a Here's my response: long answer"
    assert written(limits("", "granite").make(9, is_open=False), own, len(own)) == own


def test_channels() -> None:
    """The model chooses the channel of what follows; if it thinks again, the answer begins."""
    made = limits("", "openai_gptoss").make(3, is_open=False)
    text = ANALYSIS + b"abc" + HARMONY_END + FINAL + b"hello"
    assert written(made, ANALYSIS + b"abc" + FINAL + b"hello", len(text)) == text
    again = limits("", "openai_gptoss").make(3, is_open=False)
    text = ANALYSIS + b"abc" + HARMONY_END + ANALYSIS + HARMONY_END + FINAL + b"hello"
    assert written(again, ANALYSIS + b"abc" + ANALYSIS + b"hello", len(text)) == text
    assert not again.may_force(len(text))


def test_channels_that_the_model_ends_itself() -> None:
    """All its thoughts and their ends count, and what is between them does not."""
    between = b"<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    model = ANALYSIS + b"ab<|end|>" + between + ANALYSIS + b"cdef"
    made = limits("", "openai_gptoss").make(len(b"ab<|end|>cdef"), is_open=False)
    text = model + HARMONY_END + b"g"
    assert written(made, model + b"g", len(text)) == text
