"""The text generator: the same text for a seed, and only right answers in it."""

import hashlib
import json
import random
import re
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest

from examples.default_model.corpus import (
    dialogs,
    frozen_requests,
    heldout_text,
    mixed_requests,
    render,
    words,
)
from examples.default_model.corpus.dialogs import (
    heldout_seed,
    heldout_turns,
    story_turn,
    train_seed,
    turns,
)
from examples.default_model.corpus.plots import PLOTS
from examples.default_model.corpus.reading import reading_turns
from examples.default_model.corpus.stories import MAX_SENTENCES, tell
from examples.default_model.corpus.tasks import (
    MAX_COUNT,
    TOO_LONG_LIST,
    add,
    count,
    list_is_right,
    list_some,
    opposite,
    spell,
    subtract,
    times,
)
from examples.default_model.corpus.turn import Turn, count_sentences
from tests.support.engine.child import output_of

ROOT = Path(__file__).parents[2]


def _digest(seed: int, count: int) -> str:
    text = "".join(render(d) for d in islice(dialogs(seed), count))
    return hashlib.sha256(text.encode()).hexdigest()


def _all_turns(number: int) -> list[Turn]:
    rng = random.Random(number)
    return [t for _ in range(number) for t in turns(rng)]


def test_same_seed_same_dialogs_in_another_process() -> None:
    """Sets and hashes of strings differ between processes; the text must not."""
    code = (
        "import sys; from itertools import islice; import hashlib\n"
        "from examples.default_model.corpus import dialogs, render\n"
        "text = ''.join(render(d) for d in islice(dialogs(7), 300))\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    assert output_of("-c", code).strip() == _digest(7, 300)
    assert _digest(7, 300) != _digest(8, 300)


def test_roles_alternate_and_nothing_is_empty() -> None:
    for dialog in islice(dialogs(3), 500):
        roles = [m["role"] for m in dialog if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert 1 <= len(roles) // 2 <= 4
        assert all(m["content"].strip() for m in dialog)
        assert not any("<|" in m["content"] for m in dialog)


@pytest.mark.parametrize("make", [add, subtract, times])
def test_arithmetic_is_right(make) -> None:
    rng = random.Random(1)
    for _ in range(2000):
        turn = make(rng)
        a, sign, b, result = re.fullmatch(r"(\d+) ([-+x]) (\d+) = (-?\d+)\.", turn.answer).groups()
        a, b = int(a), int(b)
        assert int(result) == {"+": a + b, "-": a - b, "x": a * b}[sign]
        digits = re.findall(r"\d+", turn.question)
        if "Subtract" in turn.question or "from" in turn.question.lower():
            digits.reverse()
        if "add" in turn.question.lower():
            digits.sort(key=[str(a), str(b)].index)
        if digits:
            assert digits == [str(a), str(b)], turn


def test_counting_is_right() -> None:
    rng = random.Random(2)
    for _ in range(1000):
        turn = count(rng)
        asked = [int(n) for n in re.findall(r"\d+", turn.question)]
        if asked[0] > MAX_COUNT and len(asked) == 1:
            continue
        said = [int(n) for n in turn.answer.rstrip(".").split(", ")]
        steps = {b - a for a, b in pairwise(said)}
        assert steps in ({1}, {-1}, set())
        assert said[0] == asked[0] or (len(asked) == 1 and said[0] == 1)
        assert said[-1] == asked[-1] or (len(asked) == 1 and said[-1] == 1)


def test_opposites_go_both_ways() -> None:
    assert len(words.OPPOSITE_PAIRS) >= 60
    for left, right in words.OPPOSITE_PAIRS:
        assert words.OPPOSITES[left] == right
        assert words.OPPOSITES[right] == left
    rng = random.Random(3)
    for _ in range(500):
        answer = opposite(rng).answer
        if answer.startswith("The"):
            word, other = re.fullmatch(r"The opposite of (\w+) is (\w+)\.", answer).groups()
            assert words.OPPOSITES[word] == other


def test_words_are_spelled_and_listed_as_asked() -> None:
    rng = random.Random(4)
    for _ in range(300):
        turn = spell(rng)
        assert turn.answer.rstrip(".").replace("-", "") in turn.question.lower()
        turn = list_some(rng)
        if turn.answer == TOO_LONG_LIST:
            continue
        assert list_is_right(turn.answer, turn.question), turn


@pytest.mark.parametrize("sentences", range(1, MAX_SENTENCES + 1))
def test_told_stories_have_the_asked_length(sentences: int) -> None:
    rng = random.Random(sentences)
    for _ in range(100):
        story = tell(rng, sentences)
        assert count_sentences(story.text) == sentences
        assert "{" not in story.text
        assert story.cast.hero in story.text


def test_story_requests_are_kept() -> None:
    """Length as asked in the question, and every word of the topic is in the story."""
    rng = random.Random(5)
    for _ in range(1500):
        turn, _ = story_turn(rng)
        assert turn.is_right(turn.answer), turn
        number = re.search(r"(\d+)[ -]sentence|in (\d+)|with (\d+)|of (\d+)", turn.question)
        if number:
            assert int(next(g for g in number.groups() if g)) == turn.sentences


def test_every_plot_has_each_rank_once() -> None:
    for plot in PLOTS:
        assert sorted(rank for rank, _ in plot.slots) == list(range(1, MAX_SENTENCES + 1))
        assert all("." not in t for _, texts in plot.slots for t in (*texts, *plot.one, *plot.two))


def test_answers_about_a_story_are_found_in_it() -> None:
    rng = random.Random(6)
    names = set(words.GIRLS + words.BOYS + words.COLOURS)
    for _ in range(1000):
        text = ""
        for turn in reading_turns(rng):
            text = text or turn.question
            said = set(re.findall(r"\w+", turn.answer)) & names
            assert all(word in text for word in said), turn


def test_all_answers_pass_their_own_judge() -> None:
    for turn in _all_turns(1500):
        assert turn.is_right(turn.answer), turn


def test_heldout_text_is_of_other_seeds() -> None:
    assert not {train_seed(n) for n in range(100)} & {heldout_seed(n) for n in range(100)}
    text = heldout_text(0, 20_000)
    assert text == heldout_text(0, 20_000)
    assert 20_000 <= len(text) < 30_000
    stories = {t.answer for ts in heldout_turns(0, 300) for t in ts if t.sentences > 3}
    trained = {m["content"] for d in islice(dialogs(1), 5000) for m in d}
    assert stories
    assert not stories & trained


def test_heldout_file_is_what_the_generator_writes() -> None:
    kept = (ROOT / "bench" / "data" / "heldout.txt").read_text(encoding="utf-8")
    assert kept == heldout_text()


def test_requests_of_serve_bench_are_what_the_generator_writes() -> None:
    kept = (ROOT / "bench" / "data" / "mixed.jsonl").read_text(encoding="utf-8")
    assert kept == frozen_requests()


def test_mixed_requests_end_with_the_user() -> None:
    requests = mixed_requests(0, 200)
    assert len(requests) == 200
    assert requests == mixed_requests(0, 200)
    assert requests != mixed_requests(1, 200)
    assert all(r[-1]["role"] == "user" for r in requests)


@pytest.mark.exhaustive
@pytest.mark.exhaustive
def test_training_smoke(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("tqdm")
    command = [sys.executable, "-m", "examples.train_default_model", "--smoke", "--device", "cpu"]
    for out in (tmp_path / "one", tmp_path / "two"):
        subprocess.run([*command, "--out", str(out)], cwd=ROOT, check=True, capture_output=True)
    first, again = ((tmp_path / d / "model.safetensors").read_bytes() for d in ("one", "two"))
    assert first == again, "the same seed must train the same weights"
    tmp_path /= "one"
    written = {p.name for p in tmp_path.iterdir()}
    assert written == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "eval.json",
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert json.loads((tmp_path / "eval.json").read_text())["all"]["asked"] > 0
