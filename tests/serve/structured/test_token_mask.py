"""Token masks of allowed tokens, bad words and grammars."""

from __future__ import annotations

import random

import numpy as np
import pytest
from llguidance import LLParserLimits

from serve import LLM, SamplingParams
from serve.config import default_model_path
from serve.errors import RequestError
from serve.request import FinishReason
from serve.scheduler.sequence import PENDING_TOKEN
from serve.structured import grammar_worker, mask_budget
from serve.structured.compiler import GrammarCompiler
from serve.structured.mask_budget import MaskBudget
from serve.structured.token_mask import (
    NOTHING_ALLOWED,
    TOO_COMPLEX,
    BadWords,
    Matcher,
    SequenceMask,
    all_bits,
    bits_of,
)
from serve.structured_output import StructuredOutput
from serve.text.tokenizer import Tokenizer

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(default_model_path())


@pytest.fixture(scope="module")
def compiler(tokenizer):
    made = GrammarCompiler(tokenizer, tokenizer.vocab_size + 70, {tokenizer.eos_token_id})
    yield made
    made.close()


def tokens_of(mask):
    return np.nonzero(np.unpackbits(mask.bits.view(np.uint8), bitorder="little"))[0].tolist()


def allowed(mask, output):
    mask.fill([*PROMPT, *output])
    return tokens_of(mask)


def grammar_mask(compiler, tokenizer, kind, source, **kwargs):
    matcher = Matcher(compiler.compile(StructuredOutput(kind, source)))
    eos = frozenset({tokenizer.eos_token_id})
    given = {"num_prompt": 3, "eos_ids": eos, "stop_ids": eos} | kwargs
    return SequenceMask(tokenizer.vocab_size + 70, matcher=matcher, **given)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
def test_bits(size):
    ids = [i for i in (0, 5, 31, 32, 99) if i < size]
    assert all_bits(size).tolist() == bits_of(range(size), size).tolist()
    mask = SequenceMask(size, num_prompt=3, allowed=bits_of([*ids, size, 10**6], size))
    assert allowed(mask, []) == ids
    assert allowed(mask, [5, 5]) == ids
    assert mask.ending([*PROMPT, 5]) is None


def test_bad_words():
    words = BadWords([(7,), (4, 5), (1, 2, 3), (4, 6, 4, 5)], 20)
    mask = SequenceMask(20, num_prompt=3, bad_words=words)
    everything = set(range(20)) - {7}
    assert set(allowed(mask, [])) == everything  # the prompt does not count
    assert set(allowed(mask, [4])) == everything - {5}
    assert set(allowed(mask, [4, 6])) == everything
    assert set(allowed(mask, [1, 2])) == everything - {3}
    assert set(allowed(mask, [4, 6, 4])) == everything - {5}
    assert set(allowed(mask, [4, PENDING_TOKEN])) == everything - {5}


def test_ends_wait_for_the_minimum():
    mask = SequenceMask(
        10, num_prompt=3, allowed=bits_of([4, 9], 10), stop_ids=frozenset({9}), min_output=2
    )
    assert [allowed(mask, output) for output in ([], [4], [4, 4])] == [[4], [4], [4, 9]]
    only = SequenceMask(10, num_prompt=3, allowed=bits_of([9], 10), stop_ids=frozenset({9}))
    assert allowed(only, []) == [9]
    held = SequenceMask(
        10, num_prompt=3, allowed=bits_of([9], 10), stop_ids=frozenset({9}), min_output=1
    )
    held.fill(PROMPT)
    assert held.error == NOTHING_ALLOWED
    assert held.ending([*PROMPT, 0]) is FinishReason.ERROR


def test_a_grammar_allows_its_text_and_no_special_token(compiler, tokenizer):
    mask = grammar_mask(compiler, tokenizer, "regex", "[ab]{1,3}")
    pieces = tokenizer.pieces
    texts = {pieces[token] for token in allowed(mask, [])}
    assert texts == {p for p in pieces if p and set(p) <= set(b"ab") and len(p) <= 3}
    a = pieces.index(b"a")
    assert tokenizer.eos_token_id in allowed(mask, [a])
    assert tokenizer.eos_token_id not in allowed(mask, [])
    assert mask.ending([*PROMPT, a]) is None
    assert mask.ending([*PROMPT, a, a, a]) is FinishReason.STOP
    anything = grammar_mask(compiler, tokenizer, "regex", "(?s:.*)")
    free = set(allowed(anything, []))
    assert free & tokenizer.special_ids == {tokenizer.eos_token_id}
    assert max(free) < tokenizer.vocab_size  # logits without a token are masked


@pytest.mark.parametrize("source", ["[a-z ]{1,30}[.!]", "(yes|no|maybe)( (yes|no))*", "\\d{2,9}x"])
def test_a_mask_is_a_function_of_the_tokens(compiler, tokenizer, source):
    """A mask after cuts and replacements of tokens equals one that is new."""
    rng = random.Random(source)
    changed = grammar_mask(compiler, tokenizer, "regex", source)
    output: list[int] = []
    for _ in range(150):
        step = rng.random()
        fresh = grammar_mask(compiler, tokenizer, "regex", source)
        now = allowed(fresh, output)
        assert allowed(changed, output) == now
        if step < 0.25 and output:
            del output[-rng.randint(1, min(3, len(output))) :]
            continue
        if step < 0.35:
            assert allowed(changed, [*output, PENDING_TOKEN]) == now
        token = rng.choice(now)
        ending = fresh.ending([*PROMPT, *output, token])
        assert changed.ending([*PROMPT, *output, token]) is ending
        assert changed.ending([*PROMPT, *output, token]) is ending
        if ending is None and rng.random() < 0.9:
            output.append(token)
        elif ending is not None:
            del output[len(output) // 2 :]


def test_ends_and_the_grammar(compiler, tokenizer):
    eos, a = tokenizer.eos_token_id, tokenizer.pieces.index(b"a")
    stop = frozenset({eos, 2})
    mask = grammar_mask(compiler, tokenizer, "regex", "a{1,5}", stop_ids=stop)
    assert not {eos, 2} & set(allowed(mask, []))
    assert {eos, 2} <= set(allowed(mask, [a]))
    held = grammar_mask(compiler, tokenizer, "regex", "a{1,5}", stop_ids=stop, min_output=3)
    assert not {eos, 2} & set(allowed(held, [a, a]))
    assert {eos, 2} <= set(allowed(held, [a, a, a]))
    ignored = grammar_mask(compiler, tokenizer, "regex", "a{1,5}", stop_ids=frozenset())
    assert eos not in allowed(ignored, [a])
    # only the end can follow, so the text ends despite min_output
    empty = grammar_mask(compiler, tokenizer, "regex", "", stop_ids=frozenset(), min_output=9)
    assert allowed(empty, []) == [eos]
    assert empty.ending([*PROMPT, eos]) is FinishReason.STOP
    assert empty.is_end(eos)


def test_a_stop_token_that_is_text_waits_for_the_end_of_the_grammar(compiler, tokenizer):
    a, b, c = (tokenizer.pieces.index(piece) for piece in (b"a", b"b", b"c"))
    stop = frozenset({tokenizer.eos_token_id, a})
    mask = grammar_mask(compiler, tokenizer, "regex", "b[ac]{2}", stop_ids=stop)
    now = allowed(mask, [b])
    assert c in now and a not in now
    assert a in allowed(mask, [b, c, c])


def test_a_token_outside_the_grammar_is_an_error(compiler, tokenizer):
    mask = grammar_mask(compiler, tokenizer, "regex", "a+b")
    assert mask.ending([*PROMPT, tokenizer.pieces.index(b"z")]) is FinishReason.ERROR
    assert mask.error


def test_a_full_shared_lexer_is_replaced(compiler, tokenizer, monkeypatch):
    """Sequences of one grammar share a lexer, and each gets its own once that is full."""
    limits = LLParserLimits(max_lexer_states=3000, verbose_errors=False)
    monkeypatch.setattr(grammar_worker, "_LIMITS", limits)
    structured = StructuredOutput("regex", "(.*[a-m].{6}){3}")
    shared = Matcher(compiler.compile(structured))
    renewing = Matcher(compiler.compile(structured), lambda: compiler.compile_unshared(structured))

    def errors(start, rng):
        count = 0
        for _ in range(20):
            mask = SequenceMask(tokenizer.vocab_size + 70, num_prompt=3, matcher=start.copy())
            output: list[int] = []
            while len(output) < 6 and mask.error is None:
                output.append(rng.choice(allowed(mask, output)))
                mask.ending([*PROMPT, *output])
            count += mask.error is not None
        return count

    assert errors(shared, random.Random(1)) > 10
    assert errors(renewing, random.Random(1)) == 0
    assert not compiler.is_cached(structured)  # the next request gets an empty lexer, too


def test_a_model_without_eos(tokenizer):
    compiler = GrammarCompiler(tokenizer, 1000, set())
    mask = SequenceMask(
        1000, num_prompt=3, matcher=Matcher(compiler.compile(StructuredOutput("regex", "a*")))
    )
    texts = {tokenizer.pieces[token] for token in allowed(mask, [])}
    assert texts and all(set(text) == set(b"a") for text in texts)
    compiler.close()


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 1_000_000}, "allowed_token_ids"),
        ({"bad_words": "no"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"bad_words": ["x" * 1000]}, "bad_words"),
        ({"bad_words": ["x"] * 1_000_000}, "bad_words"),
        ({"structured": {"type": "object"}}, "structured"),
        (
            {"structured": StructuredOutput("json_object"), "allowed_token_ids": [1]},
            "allowed_token_ids",
        ),
    ],
)
def test_invalid_parameters_are_refused(settings, param):
    """Covers row P15 of the catalogue of bad inputs."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**settings)
    assert caught.value.param == param


def test_in_the_engine():
    with LLM(str(default_model_path()), max_num_seqs=4) as llm:

        def run(**kwargs):
            given = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
            params = SamplingParams(**(given | kwargs))
            return llm.generate(["Once upon a time"], params, use_tqdm=False)[0].outputs[0]

        free = run()
        few = run(allowed_token_ids=[20, 21, 22], temperature=1.0, seed=1, max_tokens=40)
        assert set(few.token_ids) <= {20, 21, 22} and len(few.token_ids) == 40
        word = max(free.text.split(), key=len).strip(".,!")
        without = run(bad_words=[word])
        assert word in free.text
        assert word not in without.text
        with pytest.raises(RequestError, match="allowed_token_ids") as caught:
            run(allowed_token_ids=[5, 10**6])
        assert caught.value.param == "allowed_token_ids"
        assert run().token_ids == free.token_ids


def test_masks_of_one_request_share_a_budget(compiler, tokenizer, monkeypatch):
    """The sequences of a request share its budget; without a grammar there is no bound."""
    for name, seconds in {
        "_MASKS_S": 1e-9,
        "_USUAL_MASK_S": 0,
        "_USUAL_MASK_S_PER_TOKEN": 0,
    }.items():
        monkeypatch.setattr(mask_budget, name, seconds)
    budget = MaskBudget(tokenizer.vocab_size)
    given = compiler, tokenizer, "json_object", ""
    first, second = (grammar_mask(*given, budget=budget) for _ in range(2))
    assert allowed(first, []) and first.error is None
    second.fill(PROMPT)
    assert second.error == TOO_COMPLEX
    plain = SequenceMask(tokenizer.vocab_size, num_prompt=3, budget=budget)
    plain.fill(PROMPT)
    assert plain.error is None


def test_masks_of_a_draft_are_charged_to_nobody(compiler, tokenizer):
    """A request with drafts does not spend its budget sooner than without. After a draft the mask
    is what it was."""
    budget = MaskBudget(tokenizer.vocab_size)
    mask = grammar_mask(compiler, tokenizer, "json_object", "", budget=budget)
    mask.fill(PROMPT)
    bits, before = mask.bits.copy(), vars(budget).copy()
    mask.fill_draft(PROMPT, tokenizer.encode('{"a": 1}', add_special_tokens=False))
    assert len(mask.draft_bits) > 1
    assert vars(budget) == before
    assert (mask.bits == bits).all()
