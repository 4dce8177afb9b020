"""A child process checks a tokenizer's file: what is in use loads, and what explodes does not."""

from __future__ import annotations

import json
import resource
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from serve.errors import ModelLoadError, RequestError
from serve.text import tokenizer_check, tokenizer_file, tokenizer_worker
from serve.text.tokenizer import Tokenizer
from serve.text.tokenizer_check import TextLimits
from serve.text.tokenizer_file import Refused
from tests.support.engine import tokenizer_pipelines as make
from tests.support.engine.checkpoints import Json
from tests.support.engine.tokenizer_files import write_config
from tests.support.text.trials import forget

TEXT = "The quick brown fox, 1234567 times:\n\n  naïve café, 日本語, 👍🏽 \ufdfa  end "


def write(path: Path, state: Json) -> Path:
    write_config(path)
    (path / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    return path


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", make.pipelines())
def test_what_is_in_use_loads(name: str, tmp_path: Path) -> None:
    """The tokens are those of the library alone."""
    from tokenizers import Tokenizer as Fast

    path = write(tmp_path / "model", make.pipelines()[name]())
    tokenizer = Tokenizer.load(path)
    alone = Fast.from_file(str(path / "tokenizer.json"))
    assert tokenizer.encode(TEXT) == alone.encode(TEXT).ids
    assert tokenizer.decode(tokenizer.encode_plain("fox")).strip()


def nine_replaces(state: Json) -> None:
    """Each makes ten letters of one."""
    steps = [make.replace("a" * 10, String="a")] * 9
    state["normalizer"] = make.sequence("normalizers", *steps)


def in_two_sequences(state: Json) -> None:
    step = make.replace("a" * 50, String="a")
    inner = make.sequence("normalizers", step, step)
    state["normalizer"] = make.sequence("normalizers", inner, inner)


def without_types(state: Json) -> None:
    step = {"pattern": {"String": "a"}, "content": "a" * 10}
    state["normalizer"] = {"normalizers": [step] * 9, "type": "Sequence"}


def insert_beside_each_character(state: Json) -> None:
    steps = [make.replace("abcdef", Regex="(?=.)")] * 3
    state["normalizer"] = make.sequence("normalizers", *steps)


def a_form_of_what_is_inserted(state: Json) -> None:
    """The normal form of the inserted character has 18."""
    steps = [make.replace("\ufdfa\ufdfa", String="a"), {"type": "NFKC"}]
    state["normalizer"] = make.sequence("normalizers", *(steps * 9))


def prepend(state: Json) -> None:
    state["normalizer"] = {"type": "Prepend", "prepend": "a" * 1000}


def a_table_of_long_texts(state: Json) -> None:
    texts = b"".join(make.charsmap_texts())
    table = make.charsmap()
    state["normalizer"] = make.precompiled(table[: len(table) - len(texts)] + texts)


def ideographs(state: Json) -> None:
    state["normalizer"] = make.sequence("normalizers", *[make.bert()["normalizer"]] * 20)


def many_steps(state: Json) -> None:
    steps = [{"type": "NFC"}] * 100_000
    state["normalizer"] = make.sequence("normalizers", *steps)


def bytes_of_bytes(state: Json) -> None:
    steps = [make.byte_level()] * 30
    state["pre_tokenizer"] = make.sequence("pretokenizers", *steps)


def a_decoder(state: Json) -> None:
    steps = [make.replace("a" * 10, String="a")] * 9
    state["decoder"] = make.sequence("decoders", *steps)


def the_text_twice(state: Json) -> None:
    state["post_processor"]["single"] *= 1000


def many_special_tokens(state: Json) -> None:
    for item in state["post_processor"]["special_tokens"].values():
        item["ids"] *= 100_000
        item["tokens"] *= 100_000


def a_long_token(state: Json) -> None:
    state["model"]["vocab"]["a" * 100_000] = 317


def a_long_added_token(state: Json) -> None:
    state["added_tokens"].append(dict(state["added_tokens"][0], content="a" * 9000, id=315))


def a_long_unknown_token(state: Json) -> None:
    state["model"]["unk_token"] = "a" * 1000


def a_key_twice(state: Json) -> None:
    """The two parsers might take different ones."""
    state["normalizer"] = {"type": "Prepend", "prepend": "a", "dup": 1}


EXPLODING: dict[Callable[[Json], None], str] = {
    nine_replaces: "too many times longer",
    in_two_sequences: "too many times longer",
    without_types: "too many times longer",
    insert_beside_each_character: "too many times longer",
    a_form_of_what_is_inserted: "too many times longer",
    prepend: "inserts 1000 characters",
    a_table_of_long_texts: "inserts",
    ideographs: "too many times longer",
    many_steps: "more than 128 steps",
    bytes_of_bytes: "more than once",
    a_decoder: "has a decoder",
    the_text_twice: "repeats the text",
    many_special_tokens: "more than 256 tokens",
    a_long_token: "a token of 100000 characters",
    a_long_added_token: "a token of 9000 characters",
    a_long_unknown_token: "unk_token of more than 64",
    a_key_twice: "a key twice",
}


@pytest.mark.parametrize("change", EXPLODING, ids=lambda change: change.__name__)
@pytest.mark.row("X7")
def test_what_explodes_is_refused(change: Callable[[Json], None], tmp_path: Path) -> None:
    """The message names the file, and this process needs no more memory than before."""
    state = make.bytes_state()
    change(state)
    path = write(tmp_path / "model", state)
    file = path / "tokenizer.json"
    file.write_text(file.read_text().replace('"dup"', '"prepend"'))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError, match=EXPLODING[change]) as caught:
        Tokenizer.load(path)
    assert str(file) in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


@pytest.mark.covering(1)
@pytest.mark.parametrize("regex", [r"(a+)+$", r"(\w+)+!", r"(?:a|a)*b", r"(q*q*)*x", r"(a|aa)+$"])
@pytest.mark.parametrize("step", ["normalizer", "pre_tokenizer"])
@pytest.mark.row("X7")
def test_exponential_patterns_are_refused(regex: str, step: str, tmp_path: Path) -> None:
    state = make.bytes_state()
    state[step] = make.split(regex) if step == "pre_tokenizer" else make.replace("", Regex=regex)
    with pytest.raises(ModelLoadError, match="cannot split 116 characters"):
        Tokenizer.load(write(tmp_path / "model", state))


@pytest.mark.exhaustive
@pytest.mark.row("X7")
def test_a_pattern_that_is_slow_for_one_script(tmp_path: Path) -> None:
    """It took 1.2 s for 604 characters, and the trial had none of its letters."""
    state = make.bytes_with(None, r"\p{Greek}*\p{Greek}*\p{Greek}*z|.")
    with pytest.raises(ModelLoadError, match=r"(cube|too long|cannot split|takes)"):
        Tokenizer.load(write(tmp_path / "model", state))


@pytest.mark.row("X7")
def test_long_words_of_a_word_piece_model(tmp_path: Path) -> None:
    """A word that no token begins takes the square of its length."""
    state = make.bert()
    state["model"]["max_input_chars_per_word"] = 1_000_000_000
    with pytest.raises(ModelLoadError, match="max_input_chars_per_word above 1000"):
        Tokenizer.load(write(tmp_path / "model", state))


@pytest.mark.parametrize("num_disturbed", [1, 4, 99])
def test_a_busy_machine_does_not_make_a_tokenizer_slow(
    num_disturbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a time that stays long refuses a file."""
    measured: list[int] = []

    def seconds(encode: object, text: str, limit_s: float) -> float:
        longer = len(text) >= 4 * 1024  # of a run that took a millisecond
        measured.extend([len(text)] if longer else [])
        return len(text) * 1e-6 * (50 if longer and len(measured) <= num_disturbed else 1)

    monkeypatch.setattr(tokenizer_worker, "_seconds", seconds)
    if num_disturbed == 99:
        with pytest.raises(Refused, match="cube"):
            tokenizer_worker._square_seconds(len, "a", "")
    else:
        assert tokenizer_worker._square_seconds(len, "a", "") == 0.0


@pytest.mark.row("X7")
def test_a_trial_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token for each length of a run makes a text take the cube of a token's length."""
    state = make.unigram_with(make.sequence("normalizers"))
    state["model"]["vocab"] += [["a" * size, -1.0] for size in range(2, 3000)]
    path = write(tmp_path / "model", state)
    monkeypatch.setattr(tokenizer_check, "CHECK_TIMEOUT_S", 1.0)
    began = time.monotonic()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json .*(longer than 1 s|the cube)"):
        Tokenizer.load(path)
    assert time.monotonic() - began < 10


@pytest.mark.row("X7")
def test_a_trial_that_takes_too_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model", make.bytes_state())
    monkeypatch.setattr(tokenizer_check, "BASE_MEMORY_BYTES", 1 << 20)
    forget(monkeypatch)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json .*(ended|memory|too long)"):
        Tokenizer.load(path)


def test_a_checked_file_is_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model", make.bytes_state())
    ids = Tokenizer.load(path).encode(TEXT)
    monkeypatch.setattr(tokenizer_check, "_ask", None)
    assert Tokenizer.load(path).encode(TEXT) == ids
    edited = make.bytes_state() | {"normalizer": {"type": "NFC"}}
    with pytest.raises(TypeError):
        Tokenizer.load(write(path, edited))


# -- texts


@pytest.mark.row("X7")
def test_a_text_that_grows_too_long_is_refused(tmp_path: Path) -> None:
    """A legal table makes 18 characters of one."""
    path = write(tmp_path / "model", make.unigram_with(make.precompiled()))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("\ufdfa" * 1000)
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        with pytest.raises(RequestError, match="makes more than 1000000 characters") as caught:
            encode("\ufdfa" * 300_000)
        assert (caught.value.param, caught.value.code) == ("prompt", "invalid_prompt")


def test_growth_is_measured_where_a_text_may_grow(tmp_path: Path) -> None:
    state = make.bytes_state()
    assert Tokenizer.load(write(tmp_path / "plain", state)).growth("\ufdfa" * 5000) == 1.0
    tokenizer = Tokenizer.load(write(tmp_path / "nfkc", state | {"normalizer": {"type": "NFKC"}}))
    assert tokenizer.max_growth == 18.0
    assert tokenizer.growth("a" * 5000) == tokenizer.growth("") == 1.0
    assert tokenizer.growth("\ufdfa" * 5000) == pytest.approx(18 / 1.5)  # 3 bytes before


def test_a_long_text_that_does_not_grow_is_accepted() -> None:
    TextLimits(growth=100.0).check("a" * 5_000_000, lambda part: part)


@pytest.mark.parametrize(
    ("name", "char"), [("digits in threes", "1"), ("DeepSeek", " ")], ids=["digits", "spaces"]
)
@pytest.mark.row("X7")
def test_runs_that_take_the_square_of_their_length(name: str, char: str, tmp_path: Path) -> None:
    """A million digits took twenty minutes of a thread that nothing could stop."""
    tokenizer = Tokenizer.load(write(tmp_path / "model", make.pipelines()[name]()))
    assert tokenizer.encode(char * 3000 + "x")
    assert tokenizer.encode((char * 900 + "x") * 100)
    began = time.monotonic()
    with pytest.raises(RequestError, match="in a row"):
        tokenizer.encode(char * 1_000_000 + "x")
    assert time.monotonic() - began < 1


@pytest.mark.row("X7")
def test_runs_are_counted_in_linear_time() -> None:
    """100 kB of runs of 1,023 letters took 0.85 s, without letting other threads run."""
    limits = TextLimits(squares=((r"[^\W\d_]", 1e-12),))
    text = ("a" * 1023 + "\x01") * 1000
    began = time.process_time()
    limits.check(text, str)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("size", [1, 3, 4, 1000])
def test_runs_across_the_searched_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_check, "SEARCHED_CHARS", size)
    sizes = [run for run in tokenizer_check._run_sizes(r"\d", "12a345678b9c0") if run]
    assert sizes == [2, 6, 1, 1]


def test_linear_patterns_have_no_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "model", make.bytes_with(None, make.GPT4))
    assert tokenizer_check.check_file(path / "tokenizer.json").limits == TextLimits()


# -- sentencepiece


def test_sentencepiece_growth(tmp_path: Path) -> None:
    path = write_config(tmp_path / "model")
    (path / "tokenizer.model").write_bytes(make.unigram_model())
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("the fox \ufdfa")
    with pytest.raises(RequestError, match="makes more than"):
        tokenizer.encode("\ufdfa" * 300_000)


@pytest.mark.row("X7")
def test_a_sentencepiece_table_of_long_texts(tmp_path: Path) -> None:
    texts = make.charsmap_texts()
    data = make.unigram_model().replace(b"\0".join(texts), b"a".join(texts))
    path = write_config(tmp_path / "model")
    (path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model has a step that inserts"):
        Tokenizer.load(path)


@pytest.mark.exhaustive
def test_normal_forms_make_at_most_this_much_of_a_character() -> None:
    def most(form: Callable[[str], str]) -> int:
        return max(len(form(chr(code))) for code in range(0x110000) if not 0xD800 <= code < 0xE000)

    def normal(form: str) -> Callable[[str], str]:
        return lambda text: unicodedata.normalize(form, text)  # type: ignore[arg-type]

    def lower_before(form: str) -> Callable[[str], str]:
        return lambda text: normal(form)(text.lower())

    def lower_behind(form: str) -> Callable[[str], str]:
        return lambda text: normal(form)(text).lower()

    limits = tokenizer_file._FORMS
    for name in ("NFC", "NFD", "NFKC", "NFKD"):
        for form in (normal(name), lower_before(name), lower_behind(name)):
            assert most(form) == limits[name]
    assert most(str.lower) == limits["Lowercase"]
