"""tokenizer.json of this year's families: the steps they have, with a small vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from serve.text.detokenizer import DetokenizerFactory
from serve.text.tokenizer import Tokenizer
from tests.support.engine import tokenizer_pipelines as make
from tests.support.engine.checkpoints import BOS, Json
from tests.support.engine.tokenizer_files import write_config
from tests.support.text.trials import try_for_real

pytestmark = pytest.mark.usefixtures("no_trials")
TEXTS = (
    "The quick brown fox, 1234567 times:\n\n  I'LL don't  end ",
    "naïve café 日本語abc中文 ٣٤ \ufdfa \u0301x",
    "👍🏽👨\u200d👩\u200d👧 \r\n\r\n\t\tx = {'a': [1.5e-3]};  // ok\n",
    " a",
)
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
O200K_WITH_CONTRACTIONS = "|".join(
    part + f"{CONTRACTIONS}?" * (at < 2) for at, part in enumerate(make.O200K.split("|"))
)
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+{CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DIGITS: Json = {"type": "Digits", "individual_digits": True}
NFC: Json = {"type": "NFC"}


def byte_level_with(normalizer: Json | None, *steps: Json, use_regex: bool) -> Json:
    last = make.byte_level() | {"use_regex": use_regex}
    return make.bytes_state() | {
        "normalizer": normalizer,
        "pre_tokenizer": make.sequence("pretokenizers", *steps, last) if steps else last,
    }


def falcon() -> Json:
    """The step that makes characters of bytes is not the last."""
    threes = make.split("[0-9][0-9][0-9]")
    state = byte_level_with(None, use_regex=True)
    byte_level = state["pre_tokenizer"]
    punctuation = {"type": "Punctuation", "behavior": "Contiguous"}
    steps = (punctuation, byte_level, DIGITS | {"individual_digits": False}, threes)
    return state | {"pre_tokenizer": make.sequence("pretokenizers", *steps)}


def two_post_processors(state: Json) -> Json:
    """Llama 3 and its descendants: offsets, and then BOS."""
    offsets = make.byte_level() | {"trim_offsets": False}
    return state | {"post_processor": make.sequence("processors", offsets, state["post_processor"])}


def pieces(*normalizers: Json, pre_tokenizer: Json | None, strip: bool) -> Json:
    normalizer = make.sequence("normalizers", *normalizers) if len(normalizers) != 1 else None
    state = make.pieces_with(normalizer or normalizers[0], pre_tokenizer)
    steps = [make.replace(" ", String=make.SPACE), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if strip:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return state | {"decoder": make.sequence("decoders", *steps)}


def gemma() -> Json:
    """Runs of line ends and HTML tags are added tokens, and those of turns are special."""
    merged = {"behavior": "MergedWithPrevious", "invert": False}
    between = {"type": "Split", "pattern": {"String": " "}} | merged
    state = pieces(make.replace(make.SPACE, String=" "), pre_tokenizer=between, strip=False)
    size = max(state["model"]["vocab"].values()) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = {"\n\n": False, "<start_of_turn>": True, "<h1>": False}
    state["added_tokens"] += [
        {"id": size + at, "content": name, "special": special, **flags}
        for at, (name, special) in enumerate(names.items())
    ]
    return state


def families() -> dict[str, Callable[[], Json]]:
    prepend = {"type": "Prepend", "prepend": make.SPACE}
    spaces = make.replace(make.SPACE, String=" ")
    return {
        "SmolLM3, Hunyuan": lambda: two_post_processors(make.bytes_with(None, make.GPT4)),
        "Granite 3, StarCoder 2": lambda: byte_level_with(None, DIGITS, use_regex=True),
        "Granite 4, Phi-4, OLMo 2, GLM-4": lambda: make.bytes_with(None, make.GPT4),
        "OLMoE, StableLM": lambda: byte_level_with(NFC, use_regex=True),
        "Cohere 2": lambda: byte_level_with(NFC, DIGITS, use_regex=True),
        "gpt-oss, Llama 4": lambda: make.bytes_with(None, O200K_WITH_CONTRACTIONS),
        "Mistral's tekken, Apertus": lambda: make.bytes_with(None, make.O200K),
        "DeepSeek-V3": lambda: make.bytes_with(make.sequence("normalizers"), *DEEPSEEK_V3),
        "Kimi": lambda: make.bytes_with(None, KIMI),
        "EXAONE 4, Seed-OSS, MiniMax": lambda: make.bytes_with(NFC, make.GPT4),
        "Falcon 3": falcon,
        "Gemma": gemma,
        "Phi-3": lambda: pieces(prepend, spaces, pre_tokenizer=None, strip=True),
        "ERNIE 4.5, InternLM3": lambda: pieces(
            spaces, pre_tokenizer=make.metaspace() | {"prepend_scheme": "never"}, strip=False
        ),
    }


@pytest.mark.parametrize("name", families())
def test_loads_and_decodes_by_bytes(name: str, tmp_path: Path) -> None:
    """Token ids and text are those of the library; each id adds known bytes to a text."""
    from tokenizers import Tokenizer as Fast

    path = write_config(tmp_path / "model")
    (path / "tokenizer.json").write_text(json.dumps(families()[name]()), encoding="utf-8")
    tokenizer = Tokenizer.load(path)
    alone = Fast.from_file(str(path / "tokenizer.json"))
    assert tokenizer.pieces is not None
    factory = DetokenizerFactory(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == alone.encode(text).ids and ids[0] == tokenizer.special_token_ids[BOS]
        assert tokenizer.decode(ids) == alone.decode(ids)
        detokenizer = factory.make()
        got = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        # the engine, not the detokenizer, removes a space in front
        assert got.removeprefix(" " * tokenizer.strips_leading_space) == alone.decode(ids)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", families())
def test_the_trial_accepts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_for_real(monkeypatch)
    path = write_config(tmp_path / "model")
    (path / "tokenizer.json").write_text(json.dumps(families()[name]()), encoding="utf-8")
    assert Tokenizer.load(path).encode(TEXTS[0])


def test_tokens_of_turns_stay_out_of_plain_text(tmp_path: Path) -> None:
    path = write_config(tmp_path / "model")
    (path / "tokenizer.json").write_text(json.dumps(gemma()), encoding="utf-8")
    tokenizer = Tokenizer.load(path)
    turn = tokenizer.special_token_ids["<start_of_turn>"]
    assert tokenizer.encode("<start_of_turn>a\n\n<h1>")[1:4:2] == [turn, turn - 1]
    assert "<h1>" not in tokenizer.special_token_strings
    assert not tokenizer.special_ids.intersection(tokenizer.encode_plain("<start_of_turn>a"))
