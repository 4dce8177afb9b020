"""Incremental decoding equals decoding at once, never splits a character and finds stop strings."""

from __future__ import annotations

import random

import pytest

from serve.text.detokenizer import (
    BytesDetokenizer,
    DetokenizerFactory,
    ShownTokens,
    StopStrings,
    TailDetokenizer,
)
from serve.text.tokenizer import Tokenizer
from tests.support.engine.checkpoints import checkpoint

TEXTS = [
    "plain words, and more of them",
    "naïve café 日本語のテキスト 👍🏽 👨‍👩‍👧 e\u0301 \u202eright\u202c",
    "  leading and  double spaces\n\n\tand tabs ",
    "",
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(checkpoint("llama"))


def make_detokenizer(tokenizer, **kwargs):
    return DetokenizerFactory(tokenizer).make(**kwargs)


def pieces_of(detokenizer, token_ids):
    parts = [detokenizer.push(token) for token in token_ids]
    return [*parts, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["bytes", "tail"])
@pytest.mark.row("T14")
def test_streamed_text_is_the_text(tokenizer, text, kind):
    ids = tokenizer.encode(text, add_special_tokens=False)
    if kind == "bytes":
        detokenizer = make_detokenizer(tokenizer)
        assert isinstance(detokenizer, BytesDetokenizer)
    else:
        detokenizer = TailDetokenizer(tokenizer, True)
    parts = pieces_of(detokenizer, ids)
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.row("T14")
def test_random_tokens_decode_incrementally(tokenizer, seed):
    """Random ids are mostly invalid UTF-8, of which both decoders replace the same bytes."""
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(60)]
    assert "".join(pieces_of(make_detokenizer(tokenizer), ids)) == tokenizer.decode(ids)


def test_special_tokens_are_skipped_by_default(tokenizer):
    ids = [tokenizer.bos_token_id, *tokenizer.encode("hi", add_special_tokens=False)]
    assert "".join(pieces_of(make_detokenizer(tokenizer), ids)) == "hi"
    shown = make_detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(pieces_of(shown, ids)) == "<s>hi"


@pytest.mark.parametrize("kind", ["bytes", "tail"])
def test_chosen_special_tokens_are_shown(tokenizer, kind):
    """A special token in the middle of a character ends the character."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    snow = tokenizer.encode("☃", add_special_tokens=False)
    hi = tokenizer.encode("hi", add_special_tokens=False)
    assert len(snow) > 1
    ids = [bos, *hi, eos, *snow, eos, bos, *snow[:-1], eos, *hi]
    shown = {eos: "</s>"}
    inner = TailDetokenizer(tokenizer, True) if kind == "tail" else make_detokenizer(tokenizer)
    assert "".join(pieces_of(ShownTokens(inner, shown), ids)) == "hi</s>☃</s>\ufffd</s>hi"
    made = make_detokenizer(tokenizer, shown=("</s>", "<other>"))
    assert "".join(pieces_of(made, ids)) == "hi</s>☃</s>\ufffd</s>hi"


def test_ids_without_a_token_add_nothing(tokenizer):
    detokenizer = make_detokenizer(tokenizer)
    assert detokenizer.push(10**6) == ""
    assert detokenizer.push(len(tokenizer.pieces) - 1) == ""


def run(stops, chunks, include=False):
    matcher = StopStrings(tuple(stops), include=include)
    shown = ""
    for chunk in chunks:
        text, matched = matcher.push(chunk)
        shown += text
        if matched is not None:
            return shown, matched
    return shown + matcher.finish(), None


@pytest.mark.parametrize(
    ("stops", "chunks", "shown", "matched"),
    [
        (["END"], ["abENDcd"], "ab", "END"),
        (["END"], ["abE", "N", "Dcd"], "ab", "END"),
        (["END"], ["abE", "N", "X"], "abENX", None),
        (["END"], ["abEN"], "abEN", None),
        (["aab"], ["aaa", "ab"], "aa", "aab"),
        (["\n\n", "x"], ["a\n", "b\n", "\nx"], "a\nb", "\n\n"),
        (["longer stop", "stop"], ["a longer st", "op"], "a ", "longer stop"),
        (["bc", "abcd"], ["abcd"], "a", "bc"),
        (["日本"], ["x日", "本y"], "x", "日本"),
        (["a"], ["a"], "", "a"),
    ],
)
@pytest.mark.row("P16")
def test_stop_strings(stops, chunks, shown, matched):
    assert run(stops, chunks) == (shown, matched)
    text = "".join(chunks)
    if matched is not None:
        assert run(stops, chunks, include=True) == (shown + matched, matched)
        assert run(stops, list(text)) == (shown, matched)


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.row("P16")
def test_stop_strings_do_not_depend_on_the_chunks(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(30))
    stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 6))) for _ in range(2)]
    chunks, rest = [], text
    while rest:
        size = rng.randint(1, 5)
        chunks.append(rest[:size])
        rest = rest[size:]
    one_by_one = run(stops, list(text))
    shown, matched = run(stops, chunks)
    assert shown + (matched or "") == text[: len(shown + (matched or ""))]
    assert shown == one_by_one[0]
    assert not any(stop in shown for stop in stops)
