"""The exercises can be answered from their prompts, and the tokenizer gives their tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench.quality import texts
from bench.quality import vocabulary as v
from bench.quality.tasks import ACCURACIES, NUM_LATER, TEXT, TEXT_TOKENS, make_exercises
from serve.text.tokenizer import Tokenizer

LENGTH = 1024
EXERCISES = make_exercises(LENGTH, 4, seed=3)


def stated(prompt: list[int]) -> dict[int, int]:
    """The facts and examples that a prompt states: `a b .`"""
    found = {}
    for key, value, stop in zip(prompt, prompt[1:], prompt[2:], strict=False):
        if stop == v.STOP:
            found[key] = value
    return found


def test_each_task_has_its_exercises():
    tasks = [one.task for one in EXERCISES]
    assert {task: tasks.count(task) for task in (*ACCURACIES, TEXT)} == {
        "needle": 4,
        "needles": 4,
        "again": 4,
        "hops": 4,
        "examples": 4,
        "later": 2,
        "text": 2,
    }
    assert all(len(one.prompt) == LENGTH for one in EXERCISES)
    assert all(len(one.following) == TEXT_TOKENS for one in EXERCISES if one.task == TEXT)


@pytest.mark.parametrize("task", ["needle", "needles", "again", "hops", "later"])
def test_the_prompt_states_what_is_asked(task):
    for one in (x for x in EXERCISES if x.task == task):
        facts = stated(one.prompt)
        text = one.prompt[-3:] + one.following
        for place in (3 + place for places in one.answers for place in places):
            assert text[place - 1] == v.COLON
            assert facts[text[place - 2]] == text[place]
        assert len(one.answers) == (NUM_LATER if task == "later" else 1)


def test_a_new_item_has_the_label_of_its_class():
    for one in (x for x in EXERCISES if x.task == "examples"):
        item = one.prompt[-1]
        of_class = {
            label
            for other, label in stated(one.prompt).items()
            if (other - v.ITEMS) // v.ITEMS_PER_CLASS == (item - v.ITEMS) // v.ITEMS_PER_CLASS
        }
        assert item not in one.prompt[:-1] and of_class == {one.following[-1]}


def test_training_texts_ask_what_they_have_stated():
    random = np.random.default_rng(5)
    asked = 0
    for _ in range(20):
        tokens, kinds = texts.training_text(random, 512)
        facts: dict[int, int] = {}
        for place in range(2, len(tokens)):
            if tokens[place] == v.STOP:
                facts[int(tokens[place - 2])] = int(tokens[place - 1])
            elif kinds[place] == texts.ANSWER and v.NAMES <= tokens[place] < v.ITEMS:
                assert facts[int(tokens[place - 2])] == tokens[place]
                asked += 1
    assert asked > 100


def test_the_tokenizer_reads_the_words_as_their_tokens(tmp_path):
    v.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path, model=tmp_path)
    tokens = list(range(v.BOS, v.VOCAB_SIZE))
    assert tokenizer.encode(v.text_of(tokens)) == tokens
    words = sorted(v.all_words())
    assert not any(b.startswith(a) for a, b in itertools.pairwise(words))
