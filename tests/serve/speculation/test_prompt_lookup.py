"""What prompt lookup proposes, and what it keeps."""

from __future__ import annotations

import pytest

from ops.cpu import native_library
from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.scheduler.sequence import Sequence, make_sequences
from serve.speculation import prompt_lookup
from serve.speculation.prompt_lookup import PromptLookup

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)


def sequence_of(tokens: list[int], num_prompt: int | None = None, **who: str) -> Sequence:
    """Returns a sequence of a prompt and the first tokens of its answer."""
    size = len(tokens) if num_prompt is None else num_prompt
    params = SamplingParams(max_tokens=900, seed=0, cache_salt=who.get("salt"))
    request = Request("r", None, tuple(tokens[:size]), params, 0.0, who.get("client"))
    [sequence] = make_sequences(request, frozenset())
    sequence.token_ids.extend(tokens[size:])
    return sequence


def proposed(lookup: PromptLookup, sequence: Sequence, most: int = 4) -> list[int]:
    [draft] = lookup.propose([sequence], most)
    return [] if draft is None else draft.token_ids


def test_what_followed_the_same_words_before():
    lookup, sequence = PromptLookup(), sequence_of([1, 2, 3, 4, 5, 6, 9, 2, 3, 4])
    assert proposed(lookup, sequence) == [5, 6, 9, 2]
    sequence.token_ids.append(5)
    assert proposed(lookup, sequence, 2) == [6, 9]
    sequence.token_ids.append(77)
    assert proposed(lookup, sequence) == []


def test_a_longer_match_is_of_another_kind():
    lookup = PromptLookup()
    kinds = []
    for size in (2, 4, 8, 16):
        words = list(range(100, 100 + size))
        [draft] = lookup.propose([sequence_of([*words, 7, 8, 9, *words])], 3)
        assert draft is not None
        kinds.append(draft.kind)
    assert kinds == [0, 1, 2, 3]
    assert lookup.propose([sequence_of([5, 7, 5])], 3) == [None], "one word is no match"


ANSWER = list(range(200, 230))


@pytest.mark.parametrize(
    ("asks", "is_known"),
    [
        ({"client": "a"}, True),
        ({"client": "b"}, False),
        ({}, False),
        ({"client": "a", "salt": "x"}, False),
    ],
)
def test_answers_of_the_same_client_under_the_same_salt(asks, is_known):
    lookup = PromptLookup()
    first = sequence_of([1, 2, *ANSWER], 2, client="a")
    proposed(lookup, first)
    lookup.ended(first)
    found = proposed(lookup, sequence_of([9, 8, *ANSWER[4:8]], 2, **asks))
    assert found == (ANSWER[8:12] if is_known else [])


def test_the_longer_match_wins():
    lookup = PromptLookup()
    first = sequence_of([1, 2, *ANSWER], 2)
    proposed(lookup, first)
    lookup.ended(first)
    own = sequence_of([*ANSWER[6:8], 5, 5, *ANSWER[4:8]])
    assert proposed(lookup, own, 2) == ANSWER[8:10]
    own = sequence_of([*ANSWER[2:8], 5, 5, *ANSWER[2:8]])
    assert proposed(lookup, own, 2) == [5, 5], "of two equal ones its own"


def test_a_long_prompt_takes_several_steps(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "_TOKENS_A_STEP", 5)
    lookup, sequence = PromptLookup(), sequence_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    assert proposed(lookup, sequence) == []
    assert proposed(lookup, sequence) == []
    assert proposed(lookup, sequence) == [4, 5, 6, 7]


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "_CLIENT_TOKENS", 200)
    monkeypatch.setattr(prompt_lookup, "_MOST_CLIENTS", 3)
    lookup = PromptLookup()
    for client in range(9):
        for number in range(20):
            tokens = [1, *range(100 * number, 100 * number + 40)]
            sequence = sequence_of(tokens, 1, client=f"{client}")
            proposed(lookup, sequence)
            lookup.ended(sequence)
    assert not lookup._texts
    assert list(lookup._clients) == [(f"{client}", None) for client in (6, 7, 8)]
    for answers in lookup._clients.values():
        assert answers.index.size <= 200
        assert sum(map(len, answers._texts)) <= 200
    newest = sequence_of([1, *range(1900, 1904)], 1, client="8")
    assert proposed(lookup, newest) == list(range(1904, 1908))
