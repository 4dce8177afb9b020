"""Which files of a repository are fetched, and which GGUF model a name means."""

from __future__ import annotations

import pytest

from serve.errors import ConfigError, DownloadError
from serve.hub.choice import wanted_files
from serve.hub.listing import Listing, RepoFile
from serve.hub.name import HubName, check_revision, is_safe_path, parse_name
from serve.single_file.names import gguf_models, matching, names, quant_of

GIB = 1 << 30
TWO_PARTS = ("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf")


def listing(*paths: str) -> Listing:
    large = (".gguf", ".safetensors")
    files = {path: RepoFile(path, GIB if path.endswith(large) else 10, "0" * 40) for path in paths}
    return Listing("Org/Model", "a" * 40, files)


def chosen(*paths: str, choice: str | None = None, weight_map: object = None) -> list[str]:
    index = {"weight_map": weight_map}
    return [file.path for file in wanted_files(listing(*paths), choice, lambda file: index).files]


def refused(*paths: str, choice: str | None = None) -> str:
    with pytest.raises(DownloadError) as caught:
        wanted_files(listing(*paths), choice, lambda file: {})
    assert caught.value.code == "choice"
    return str(caught.value)


def test_a_checkpoint() -> None:
    small = ("config.json", "tokenizer.json")
    never = ("model.py", "pytorch_model.bin", "onnx/model.onnx", "README.md", "vocab.bin")
    assert chosen(*small, *never, "model.safetensors") == [*small, "model.safetensors"]
    other = ("consolidated.safetensors", "sub/model.safetensors", "sub/config.json")
    assert chosen(*small, *other, "model.safetensors") == [*small, "model.safetensors"]
    assert chosen("config.json", "x.safetensors") == ["config.json", "x.safetensors"]


def test_a_checkpoint_in_parts() -> None:
    parts = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = "model.safetensors.index.json"
    paths = ("config.json", index, "consolidated.safetensors", *parts)
    weight_map = {"a": parts[1], "b": parts[0], "c": parts[1]}
    assert chosen(*paths, weight_map=weight_map) == ["config.json", index, *parts]
    with pytest.raises(DownloadError, match="holds no weight_map"):
        chosen(*paths, weight_map={})
    text = refused("config.json", *parts)
    assert "several .safetensors files but no model.safetensors.index.json" in text


def test_templates_and_tokenizers() -> None:
    paths = (
        "config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "qwen.tiktoken",
        "tekken.json",
        "model.safetensors",
    )
    more = ("additional_chat_templates/a/b.jinja", "templates/x.jinja", "sub/tokenizer.json")
    assert chosen(*paths, *more) == list(paths)


def test_nothing_that_can_be_served() -> None:
    text = refused("config.json", "pytorch_model-00001-of-00002.bin", "model.py")
    assert "only as pytorch_model-00001-of-00002.bin, which can run code" in text
    assert "neither safetensors nor GGUF" in refused("config.json", "README.md")
    assert "an adapter, for example" in refused("adapter_model.safetensors")
    assert "has no GGUF files, so 'Q4_K_M'" in refused(
        "config.json", "model.safetensors", choice="Q4_K_M"
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ["m-Q4_K_M.gguf"]),
        ("q4_k_m", ["m-Q4_K_M.gguf"]),
        ("Q4_K_S", ["m-UD-Q4_K_S.gguf"]),
        ("UD-Q4_K_S", ["m-UD-Q4_K_S.gguf"]),
        ("Q8_0", list(TWO_PARTS)),
        ("F16", ["sub/m.F16.gguf"]),
        ("m-Q4_K_M.gguf", ["m-Q4_K_M.gguf"]),
        ("sub/m.F16.gguf", ["sub/m.F16.gguf"]),
        ("m.F16.gguf", ["sub/m.F16.gguf"]),
        (TWO_PARTS[1], list(TWO_PARTS)),
    ],
)
def test_gguf(choice: str | None, expected: list[str]) -> None:
    paths = ("m-Q4_K_M.gguf", "m-UD-Q4_K_S.gguf", *TWO_PARTS, "sub/m.F16.gguf", "mmproj-F16.gguf")
    wanted = wanted_files(listing(*paths), choice, lambda file: {})
    assert [file.path for file in wanted.files] == expected and wanted.first == expected[0]


def test_gguf_beside_safetensors() -> None:
    paths = ("config.json", "model.safetensors", "m-Q4_K_M.gguf")
    assert chosen(*paths) == ["config.json", "model.safetensors"]
    assert chosen(*paths, choice="Q4_K_M") == ["m-Q4_K_M.gguf"]
    assert chosen("config.json", "m-Q6_K.gguf") == ["m-Q6_K.gguf"]  # the only one


def test_the_models_are_listed_with_sizes_where_the_name_is_not_enough() -> None:
    text = refused("m-Q5_K_M.gguf", *TWO_PARTS)
    assert "none matches the default, Q4_K_M" in text
    assert "Org/Model:Q5_K_M  1 GiB" in text and "Org/Model:Q8_0  2 GiB" in text
    text = refused("base-Q4_K_M.gguf", "chat-Q4_K_M.gguf", "m-Q8_0.gguf", choice="Q4_K_M")
    assert "several match 'Q4_K_M'" in text and "Q8_0" not in text
    assert "Org/Model:base-Q4_K_M.gguf" in text and "Org/Model:chat-Q4_K_M.gguf" in text
    many = [f"m{number}-Q8_0.gguf" for number in range(40)]
    assert "and 10 more" in refused(*many)


def test_missing_parts() -> None:
    assert "has only 1 parts of m-Q8_0" in refused(TWO_PARTS[1], choice="Q8_0")


@pytest.mark.parametrize(
    ("stem", "quant"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_0", "Q4_0"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("gpt-oss-20b-MXFP4_MOE", "MXFP4_MOE"),
        ("m-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("m.IQ4_XS", "IQ4_XS"),
        ("m-TQ1_0", "TQ1_0"),
        ("m-BF16", "BF16"),
        ("m.fp16", "FP16"),
        ("Q4_K_M/model", "Q4_K_M"),
        ("BF16/m-Q4_0_4_4", "Q4_0_4_4"),
        ("model", ""),
        ("m-Q4_K_M-v2", ""),
        ("freq4", ""),
    ],
)
def test_quantizations(stem: str, quant: str) -> None:
    assert quant_of(stem) == quant


def test_names_of_gguf_models() -> None:
    sizes = dict.fromkeys(("a-Q8_0.gguf", "b-Q8_0.gguf", "c-Q4_0.gguf", "d.gguf"), 1)
    assert list(names(gguf_models(sizes))) == ["a-Q8_0.gguf", "b-Q8_0.gguf", "Q4_0", "d.gguf"]
    for name, model in names(gguf_models(sizes)).items():
        assert matching(gguf_models(sizes), name) == [model]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", HubName("Qwen/Qwen2.5-0.5B")),
        ("Org/m:Q4_K_M", HubName("Org/m", "Q4_K_M")),
        ("Org/m:sub/m-Q4_K_M.gguf", HubName("Org/m", "sub/m-Q4_K_M.gguf")),
        *(
            (text, None)
            for text in (
                "model",
                "./Org/m",
                "/Org/m",
                "~/m",
                "../m",
                "a/b/c",
                "Org/m:",
                "Org/m:../x",
                "Org/m:/x",
                "Org/..",
                "Org/a..b",
                "Org/a--b",
                "Org/-m",
                "Org/m ",
                "Org/m?x",
                "Örg/m",
                "Org/" + "m" * 97,
            )
        ),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert parse_name(text) == name
    assert name is None or str(name) == text


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/1", "a" * 40, "feature/x_y"])
def test_revisions(revision: str) -> None:
    assert check_revision(revision) == revision


@pytest.mark.parametrize("revision", ["", "..", "a/../b", "/a", "a/", "a//b", "-x", "a b", "a\n"])
def test_texts_that_are_no_revision(revision: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a branch, a tag or a commit"):
        check_revision(revision)


@pytest.mark.parametrize("path", ["a", "a/b.c", ".gitattributes", "ü"])
def test_safe_paths(path: str) -> None:
    assert is_safe_path(path)
