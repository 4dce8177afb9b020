"""Files of ranks and tekken.json: the tokens of tiktoken's merges, special tokens, wrong files."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve.errors import ModelLoadError
from serve.text.detokenizer import DetokenizerFactory
from serve.text.large_texts import LARGE_CHARS
from serve.text.rank_file import MAX_TOKEN_BYTES, RankRules, describe_ranks, encoded
from serve.text.rank_patterns import find_tokenizer, rules_of
from serve.text.tokenizer import Tokenizer
from tests.support.engine.rank_files import (
    NUM_SPECIAL,
    learned_ranks,
    slow_encode,
    tekken_file,
    tiktoken_file,
)
from tests.support.profile import every_day
from tests.support.text.trials import try_for_real

pytestmark = pytest.mark.usefixtures("no_trials")
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = (
    "The server's tokens, 1234567 of them:\n\n  naïve café, 日本語abc中文DEF, 👍🏽 end ",
    "I'LL DON'T  don't\t\tx\r\n\r\n\r\n ǅabc ÀÉé ١٢٣٤ \u0301a ﷺ ẞß",
    "a" * 300 + " " * 130 + "-" * 70,
)
DECLARED = {
    "1500": {"content": "[gMASK]", "special": True},
    "1501": {"content": "<sop>", "special": True},
    "1502": {"content": "<|user|>", "special": True},
}
FILES = {
    "QWenTokenizer": "qwen.tiktoken",
    "HYTokenizer": "hy.tiktoken",
    "TikTokenTokenizer": "tiktoken.model",
    "ChatGLM4Tokenizer": "tokenizer.model",
}


def ranks_directory(path: Path, name: str, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    values = {"tokenizer_class": name, "added_tokens_decoder": {}} | config
    values["auto_map"] = {"AutoTokenizer": [f"code.{name}", None]}
    if name == "ChatGLM4Tokenizer":
        values["added_tokens_decoder"] = DECLARED
    (path / "tokenizer_config.json").write_text(json.dumps(values))
    (path / FILES[name]).write_bytes(tiktoken_file(learned_ranks()))
    return path


def tekken_directory(path: Path, **options: Any) -> Path:
    path.mkdir(exist_ok=True)
    file = tekken_file(learned_ranks(), pattern=TEKKEN_PATTERN, **options)
    (path / "tekken.json").write_text(json.dumps(file))
    return path


def pushed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = DetokenizerFactory(tokenizer).make(skip_special_tokens=False)
    return "".join(map(detokenizer.push, ids)) + detokenizer.finish()


@pytest.mark.parametrize("name", FILES)
def test_ranks_are_merged_as_tiktoken_does(name: str, tmp_path: Path) -> None:
    path = ranks_directory(tmp_path / "model", name)
    rules = rules_of(find_tokenizer(path), json.loads((path / "tokenizer_config.json").read_text()))
    assert rules is not None
    tokenizer = Tokenizer.load(path)
    for text in TEXTS:
        if rules.normalizer:
            text = text.replace("\u0301a", "")  # its form is another text
        ids = slow_encode(learned_ranks(), rules.pattern, text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode_plain(text) == ids
        assert tokenizer.decode(ids) == pushed(tokenizer, ids) == text
    before = [tokenizer.special_token_ids[token] for token in rules.prefix]
    assert tokenizer.encode("fox") == [*before, *tokenizer.encode_plain("fox")]
    assert tokenizer.pieces is not None
    assert tokenizer.pieces[: len(learned_ranks())] == list(learned_ranks())


@pytest.mark.parametrize("name", every_day((3,), list(FILES)))
def test_the_trial_accepts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_for_real(monkeypatch)
    assert Tokenizer.load(ranks_directory(tmp_path / "model", name)).encode(TEXTS[0])


def test_merges_of_any_ranks() -> None:
    """Ranks that no training makes, with many ways to cut a token."""
    from tokenizers import Tokenizer as Fast

    for seed in range(60):
        draw = random.Random(seed)
        tokens = [bytes([byte]) for byte in range(256)]
        pool = [b"a", b"b", b"c"][: 2 + seed % 2]
        for _ in range(draw.randint(5, 40)):
            token = draw.choice(pool) + draw.choice(pool)
            if token not in tokens and len(token) < 12:
                tokens.append(token)
                pool.append(token)
        ranks = {token: rank for rank, token in enumerate(tokens)}
        rules = RankRules(pattern=".+").as_json()
        fast = Fast.from_buffer(encoded(describe_ranks(tiktoken_file(ranks), rules)))
        for _ in range(40):
            text = "".join(draw.choices("abc"[: 2 + seed % 2], k=draw.randint(1, 40)))
            assert fast.encode(text).ids == slow_encode(ranks, ".+", text)


def test_special_tokens_of_rank_files(tmp_path: Path) -> None:
    size = len(learned_ranks())
    qwen = Tokenizer.load(ranks_directory(tmp_path / "a", "QWenTokenizer"))
    assert qwen.encode("<|im_start|>a<|extra_204|>")[::2] == [size + 1, size + 207]
    assert len(qwen.encode_plain("<|im_start|>")) > 3
    assert qwen.encode("e\u0301") == qwen.encode("é")
    declared = {
        str(size): {"content": "[BOS]", "special": True},
        str(size + 9): {"content": "<|im_user|>", "special": True},
    }
    path = ranks_directory(
        tmp_path / "b", "TikTokenTokenizer", added_tokens_decoder=declared, bos_token="[BOS]"
    )
    kimi = Tokenizer.load(path)
    assert kimi.vocab_size == size + 256 and kimi.bos_token_id == size
    assert kimi.encode(f"<|im_user|><|reserved_token_{size + 1}|>") == [size + 9, size + 1]
    assert f"<|reserved_token_{size + 9}|>" not in kimi.special_token_strings
    # a declared token leaves the place that it would have had
    declared = {str(size + 2): {"content": "<|endoftext|>", "special": True}}
    path = ranks_directory(tmp_path / "c", "QWenTokenizer", added_tokens_decoder=declared)
    assert Tokenizer.load(path).encode("<|endoftext|><|im_start|>") == [size + 2, size + 1]


def test_plain_text_never_becomes_a_special_token() -> None:
    """A pattern may make a piece of what is also a special token's text."""
    from tokenizers import Tokenizer as Fast

    rules = RankRules(pattern=".+", names=("<s>",)).as_json()
    fast = Fast.from_buffer(encoded(describe_ranks(tiktoken_file(learned_ranks()), rules)))
    assert fast.encode("<s>").ids == [len(learned_ranks())]
    fast.encode_special_tokens = True
    assert fast.encode("<s>").ids == [learned_ranks()[char] for char in (b"<", b"s", b">")]


def test_which_file_is_the_tokenizer(tmp_path: Path) -> None:
    path = ranks_directory(tmp_path / "model", "QWenTokenizer")
    tekken_directory(path)
    assert find_tokenizer(path).name == "tekken.json"
    (path / "tokenizer.json").write_text("{}")
    assert find_tokenizer(path).name == "tokenizer.json"
    for name in ("tokenizer.json", "tekken.json"):
        (path / name).unlink()
    assert find_tokenizer(path).name == "qwen.tiktoken"
    ranks_directory(path, "HYTokenizer")
    with pytest.raises(ModelLoadError, match="2 files"):
        find_tokenizer(path)


@pytest.mark.row("X7")
def test_declared_tokens_of_ranks_that_cannot_be(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {
        "99999999": {"content": "<far>"},
        "1600": {"content": ""},
        "x": {"content": "<a>"},
        "7": {"content": "<in the place of another>"},
    }
    for key, item in wrong.items():
        path = ranks_directory(
            tmp_path / "model", "QWenTokenizer", added_tokens_decoder={key: item}
        )
        with pytest.raises(ModelLoadError, match=r"qwen\.tiktoken .*special|added_tokens_decoder"):
            Tokenizer.load(path)


def test_ranks_of_an_unknown_tokenizer(tmp_path: Path) -> None:
    path = ranks_directory(tmp_path / "model", "QWenTokenizer", tokenizer_class="EvilTokenizer")
    with pytest.raises(ModelLoadError, match=r"qwen\.tiktoken .*EvilTokenizer.* QWenTokenizer"):
        Tokenizer.load(path)


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13", "v15"])
def test_tekken(version: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tekken_directory(tmp_path / "model", version=version))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.vocab_size == len(learned_ranks()) + NUM_SPECIAL
    for text in TEXTS:
        ids = [NUM_SPECIAL + at for at in slow_encode(learned_ranks(), TEKKEN_PATTERN, text)]
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == pushed(tokenizer, ids) == text
    assert tokenizer.encode("[INST]<SPECIAL_39>[/INST]", add_special_tokens=False) == [3, 39, 4]
    assert min(tokenizer.encode_plain("[INST]<s></s>")) >= NUM_SPECIAL
    assert tokenizer.token_text(9) == "[TOOL_CALLS]"


def test_tekken_without_special_tokens_has_the_usual_ones(tmp_path: Path) -> None:
    listed = Tokenizer.load(tekken_directory(tmp_path / "a"))
    unlisted = Tokenizer.load(tekken_directory(tmp_path / "b", special=None, version="v3"))
    assert unlisted.special_token_ids == listed.special_token_ids


def test_large_texts_of_ranks(tmp_path: Path) -> None:
    """The child process reads the same file with the same rules."""
    text = TEXTS[0] * (LARGE_CHARS // len(TEXTS[0]) + 2)
    for path in (
        tekken_directory(tmp_path / "tekken"),
        ranks_directory(tmp_path / "ranks", "TikTokenTokenizer"),
        ranks_directory(tmp_path / "glm", "ChatGLM4Tokenizer"),
    ):
        tokenizer = Tokenizer.load(path)
        try:
            once = tokenizer.encode(TEXTS[0], add_special_tokens=False)
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids[: len(once) - 2] == once[:-2]
            assert tokenizer.decode(ids) == text
        finally:
            tokenizer.close()


def line(token: bytes, rank: object) -> bytes:
    return base64.b64encode(token) + b" %s\n" % str(rank).encode()


WRONG_RANKS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no base64": (lambda data: data + b"?? 1500\n", "line 1501"),
    "no rank": (lambda data: data + b"YWJj\n", "line 1501"),
    "three fields": (lambda data: data + b"YWJj 1 2\n", "line 1501"),
    "a negative rank": (lambda data: data + line(b"qq", -1), "rank -1 in line 1501"),
    "a rank of 2^40": (lambda data: data + line(b"qq", 1 << 40), "rank 1099511627776"),
    "ranks far apart": (
        lambda data: data + line(b"qq", 70_000),
        "1501 tokens with ranks up to 70000",
    ),
    "a rank of many digits": (lambda data: data + line(b"qq", "9" * 9999), "line 1501"),
    "a token twice": (lambda data: data + line(b"a", 1500), "twice, the second time in line 1501"),
    "a rank twice": (lambda data: data + line(b"q\xff\xfe", 7), "two tokens of one rank"),
    "a byte missing": (lambda data: data.replace(line(b"q", 80), b""), "no token for the byte"),
    "a long token": (lambda data: data + line(b"q" * (MAX_TOKEN_BYTES + 1), 1500), "1025 bytes"),
    "many long tokens": (
        lambda data: data + b"".join(line(b"q%0999d" % n, 1500 + n) for n in range(300)),
        "too many long tokens",
    ),
    "a special token as a plain one": (
        lambda data: data + line(b"<|im_end|>", 1500),
        r"'<\|im_end\|>' \(1503\) as a plain one",
    ),
    "nothing": (lambda data: b"\n", "no token for the byte 0x00"),
    "binary": (lambda data: bytes(range(256)) * 9, "line 1"),
}


@pytest.mark.parametrize("name", WRONG_RANKS)
@pytest.mark.row("X7")
def test_wrong_rank_files(name: str, tmp_path: Path) -> None:
    change, message = WRONG_RANKS[name]
    path = ranks_directory(tmp_path / "model", "QWenTokenizer")
    file = path / "qwen.tiktoken"
    data = file.read_bytes()
    assert line(b"q", 80) in data
    file.write_bytes(change(data))
    with pytest.raises(ModelLoadError, match=rf"qwen\.tiktoken .*{message}"):
        Tokenizer.load(path)


Tekken = dict[str, Any]
WRONG_TEKKEN: dict[str, tuple[Callable[[Tekken], object], str]] = {
    "no config": (lambda file: file.pop("config"), "no object config"),
    "no vocab": (lambda file: file.pop("vocab"), "fewer than 1500 tokens"),
    "few tokens": (lambda file: file["config"].update(default_vocab_size=9000), "fewer than 8960"),
    "no size": (lambda file: file["config"].pop("default_vocab_size"), "default_vocab_size"),
    "a size of 2^40": (
        lambda file: file["config"].update(default_vocab_size=1 << 40),
        "1099511627776 for default_vocab_size",
    ),
    "more special tokens than tokens": (
        lambda file: file["config"].update(default_num_special_tokens=5000),
        "5000 for default_num_special_tokens",
    ),
    "a million special tokens": (
        lambda file: file["config"].update(
            default_vocab_size=1 << 20, default_num_special_tokens=1 << 20
        ),
        "1048576 for default_num_special_tokens",
    ),
    "no pattern": (lambda file: file["config"].pop("pattern"), "no pattern"),
    "a long pattern": (lambda file: file["config"].update(pattern="a" * 5000), "pattern"),
    "a wrong pattern": (lambda file: file["config"].update(pattern="((a"), "cannot be used"),
    "another order": (lambda file: file["vocab"].insert(0, file["vocab"][5]), "rank 0"),
    "a token that is a number": (lambda file: file["vocab"].__setitem__(7, 7), "rank 7"),
    "no base64": (lambda file: file["vocab"][9].update(token_bytes="?"), "rank 9"),
    "no bytes": (lambda file: file["vocab"][9].update(token_bytes=None), "rank 9"),
    "a token twice": (
        lambda file: file["vocab"][300].update(token_bytes="YQ=="),
        "twice, the second time with rank 300",
    ),
    "special tokens that are no list": (lambda file: file.update(special_tokens=7), "not a list"),
    "a special token without a text": (
        lambda file: file["special_tokens"][3].pop("token_str"),
        "without a token_str",
    ),
    "a special token beyond them": (
        lambda file: file["special_tokens"][3].update(rank=40),
        "40 for rank",
    ),
    "two special tokens of one rank": (
        lambda file: file["special_tokens"][3].update(rank=4),
        "two special tokens of rank 4",
    ),
    "two special tokens of one text": (
        lambda file: file["special_tokens"][3].update(token_str="[/INST]"),
        "two special tokens of one text",
    ),
    "an empty special token": (
        lambda file: file["special_tokens"][3].update(token_str=""),
        "empty, too long or too far: 3",
    ),
    "an endless pattern": (lambda file: file["config"].update(pattern="(a*)*b|.+"), "cannot|takes"),
}


@pytest.mark.parametrize("name", WRONG_TEKKEN)
@pytest.mark.row("X7")
def test_wrong_tekken_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "an endless pattern":
        try_for_real(monkeypatch)
    change, message = WRONG_TEKKEN[name]
    path = tekken_directory(tmp_path / "model")
    file = json.loads((path / "tekken.json").read_text())
    change(file)
    (path / "tekken.json").write_text(json.dumps(file))
    with pytest.raises(ModelLoadError, match=rf"tekken\.json .*({message})"):
        Tokenizer.load(path)
