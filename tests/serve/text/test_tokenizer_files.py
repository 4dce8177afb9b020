"""A tokenizer's files: the settings that count, and invalid files that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from serve.errors import ModelLoadError, RequestError
from serve.text.tokenizer import Tokenizer
from serve.text.tokenizer_config import read_text_config
from tests.support.engine.checkpoints import BOS, CHAT_TEMPLATE, Json, checkpoint, edit_json
from tests.support.engine.tokenizer_files import sentencepiece_model, write_config

pytestmark = pytest.mark.usefixtures("no_trials")


def test_tokens_declared_only_in_tokenizer_config(tmp_path: Path) -> None:
    """A token is added if it gets the id that it declares."""
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    declared = {
        "315": {"content": "<|tool|>", "special": True, "normalized": False},
        "400": {"content": "<|far|>", "special": True},
    }
    edit_json(
        path / "tokenizer_config.json", lambda config: config.update(added_tokens_decoder=declared)
    )
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("a<|tool|>", add_special_tokens=False)[-1] == 315
    assert 315 in tokenizer.special_ids
    assert "<|far|>" not in tokenizer.special_token_strings
    assert tokenizer.vocab_size == 316


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")

    def change(state: Json) -> None:
        state["truncation"] = {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        state["padding"] = {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": BOS,
        }

    edit_json(path / "tokenizer.json", change)
    text = "the quick brown fox jumps over"
    assert Tokenizer.load(path).encode(text) == Tokenizer.load(checkpoint("llama")).encode(text)


def test_chat_template(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    config = path / "tokenizer_config.json"
    assert Tokenizer.load(path).chat_template == CHAT_TEMPLATE
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    edit_json(config, lambda values: values.update(chat_template=several))
    assert Tokenizer.load(path).chat_template == "y"
    edit_json(config, lambda values: values.pop("chat_template"))
    assert Tokenizer.load(path).chat_template is None
    (path / "chat_template.jinja").write_text("{{ 'ü' }}", encoding="utf-8")
    assert Tokenizer.load(path).chat_template == "{{ 'ü' }}"
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
        Tokenizer.load(path)


def test_special_tokens_map_is_a_fallback(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    (path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(path).bos_token_id is None
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": BOS}}))
    assert Tokenizer.load(path).bos_token_id == 0


BROKEN: dict[str, Callable[[Json], object]] = {
    "no model": lambda state: state.pop("model"),
    "unknown model": lambda state: state["model"].update(type="Telepathy"),
    "merge of unknown tokens": lambda state: state["model"]["merges"].append(["qq", "zz"]),
    "merges of another type": lambda state: state["model"].update(merges=5),
    "two tokens of one id": lambda state: state["model"]["vocab"].update(
        qq=state["model"]["vocab"]["a"]
    ),
    "negative id": lambda state: state["model"]["vocab"].update(a=-1),
    "id of 2^40": lambda state: state["model"]["vocab"].update(a=1 << 40),
    "id of 2^32 - 1": lambda state: state["model"]["vocab"].update(a=(1 << 32) - 1),
    "empty vocabulary": lambda state: (
        state.update(added_tokens=[], post_processor=None),
        state["model"].update(vocab={}, merges=[]),
    ),
    "template of an unknown token": lambda state: state["post_processor"].update(special_tokens={}),
    "bad regex": lambda state: state.update(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "(("},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
@pytest.mark.row("X7")
def test_broken_tokenizer_json(change: Callable[[Json], object], tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    edit_json(path / "tokenizer.json", change)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.load(path)


@pytest.mark.row("X7")
def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    with (path / "tokenizer.json").open("r+b") as file:
        file.truncate(1 << 30)  # takes no space
    with pytest.raises(ModelLoadError, match="1073741824 bytes"):
        Tokenizer.load(path)


@pytest.mark.row("X7")
def test_broken_files(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    data = (path / "tokenizer.json").read_bytes()
    for bad in (b"", b"{}", b"[]", b"\xff\xfe", data[: len(data) // 2], b"[" * 200_000):
        (path / "tokenizer.json").write_bytes(bad)
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
            Tokenizer.load(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        Tokenizer.load(path)
    model = sentencepiece_model()
    for bad in (b"", b"xx", b"\xff" * 100, model[:100], model[: len(model) // 2]):
        (path / "tokenizer.model").write_bytes(bad)
        with pytest.raises(ModelLoadError, match=r"tokenizer\.model"):
            Tokenizer.load(path)


def test_code_of_the_checkpoint_is_named_and_not_run(tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    (path / "evil.py").write_text("raise SystemExit")
    auto_map = {"AutoTokenizer": ["evil.T", None]}
    edit_json(path / "tokenizer_config.json", lambda values: values.update(auto_map=auto_map))
    assert Tokenizer.load(path).encode("fox") == Tokenizer.load(checkpoint("llama")).encode("fox")
    (note,) = read_text_config(path).notes
    assert "auto_map" in note and "not run" in note


@pytest.mark.row("X7")
def test_an_endless_regular_expression_is_a_request_error(tmp_path: Path) -> None:
    """The library panics after ten million steps, and the tokenizer stays usable."""
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    split = {"type": "Split", "pattern": {"Regex": "(?<=xyz)a*a*a*a*a*b"}, "behavior": "Isolated"}
    edit_json(
        path / "tokenizer.json", lambda state: state.update(pre_tokenizer=split | {"invert": False})
    )
    tokenizer = Tokenizer.load(path)
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        for text in ("xyz" + "a" * 600 + "cb", "xyz" + "a" * 6000 + "cb"):
            with pytest.raises(RequestError, match="cannot be split") as caught:
                encode(text)
            assert (caught.value.param, caught.value.code) == ("prompt", "invalid_prompt")
        assert tokenizer.decode(encode("fox"))


@pytest.mark.row("X7")
def test_a_text_without_tokens_is_a_request_error(tmp_path: Path) -> None:
    """The library raises a plain Exception where the token for unknown words is missing."""
    path = write_config(tmp_path / "model")
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"}
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("b") == [1]
    for text in ("c", "c" * 6000):
        with pytest.raises(RequestError, match="cannot encode the text: WordLevel") as caught:
            tokenizer.encode(text)
        assert (caught.value.param, caught.value.code) == ("prompt", "invalid_prompt")


@pytest.mark.row("X7")
@pytest.mark.parametrize("nested", [None, "text_config"])
def test_the_tokenizer_of_another_model(nested: str | None, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")

    def change(state: Json) -> None:
        state["model"]["vocab"]["zz"] = 5000

    edit_json(path / "tokenizer.json", change)
    if nested:
        edit_json(
            path / "config.json",
            lambda config: config.update({nested: {"vocab_size": config.pop("vocab_size")}}),
        )
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json .* id 5000, .*vocabulary has 320 "):
        Tokenizer.load(path)


@pytest.mark.row("X7")
def test_added_tokens_beyond_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gemma 3's smallest model has no row for the token of images, which its tokenizer adds."""
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")

    def change(state: Json) -> None:
        state["added_tokens"].append(dict(state["added_tokens"][0], content="<image>", id=315))

    edit_json(path / "tokenizer.json", change)
    edit_json(path / "config.json", lambda config: config.update(vocab_size=315))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.encode("a<image>")[-1] == 315
    assert "added tokens up to the id 315, and the model none beyond 314" in caplog.text
