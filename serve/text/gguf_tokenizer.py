"""Makes the files of a tokenizer from the keys of a GGUF file.

The kinds, by `tokenizer.ggml.model`: "gpt2" is a byte-level BPE with its merges; "llama" is
sentencepiece's BPE, whose merges follow from scores; "gemma4" is the same with its merges; "t5" is
sentencepiece's unigram model. Each becomes the tokenizer.json that Transformers' converters make of
the original, so that everything behind it works as for a directory.

What a GGUF file does not say is taken as llama.cpp takes it: a text after a special token begins
with a space, too (of sentencepiece's kinds), and the default of each flag.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

from serve.text.gguf_splits import SPLITTINGS, Splitting
from serve.text.gguf_vocabulary import (
    ADVICE,
    MAX_MERGES,
    PREFIX,
    Kind,
    Vocabulary,
    end_ids,
    flag,
    read_merges,
    read_vocabulary,
)
from serve.text.rank_file import MAX_SQUARES, added_token, byte_level_step
from serve.text.sentencepiece_codec import SPACE
from serve.text.tokenizer_check import MAX_FILE_BYTES
from serve.text.tokenizer_config import DEFAULT, MAX_TEMPLATE_BYTES
from serve.text.tokenizer_file import Refused

Json = dict[str, Any]
TEMPLATE_KEY = "tokenizer.chat_template"
MAX_TEMPLATES = 64
MAX_CHARSMAP_BYTES = 4 << 20
_LLAMA_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
_T5_IDS = {"pad_token": 0, "eos_token": 1, "unk_token": 2}
_DEFAULT_IDS = {"gpt2": {}, "llama": _LLAMA_IDS, "gemma4": {}, "t5": _T5_IDS}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the contents of tokenizer.json and tokenizer_config.json, by their names. metadata:
    the keys of a GGUF file, with lists for arrays. Raises Refused, a ValueError whose message goes
    after the file's name."""
    kind, vocabulary = _read(metadata)
    if kind == "gpt2":
        description, bos = _byte_level(metadata, vocabulary)
    elif kind == "t5":
        description, bos = _unigram(metadata, vocabulary), False
    else:
        description, bos = _pieces(metadata, vocabulary, kind), kind == "llama"
    has_bos = flag(metadata, "add_bos_token", bos) and kind != "gemma4"  # its template writes it
    has_eos = flag(metadata, "add_eos_token", kind == "t5")
    description |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(metadata, vocabulary),
        "post_processor": _ends(vocabulary, has_bos, has_eos),
    }
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": has_bos,
        "add_eos_token": has_eos,
    }
    config |= {name: vocabulary.texts[at] for name, at in vocabulary.named.items()}
    if template := chat_templates(metadata):
        config["chat_template"] = template
    return {
        "tokenizer.json": _encoded(description),
        "tokenizer_config.json": _encoded(config),
    }


def generation_ids(metadata: Mapping[str, Any]) -> dict[str, int | list[int]]:
    """Returns the ids of generation_config.json: bos_token_id and pad_token_id, if there are any,
    and eos_token_id with all ids that end an answer. Raises Refused."""
    _, vocabulary = _read(metadata)
    ids: dict[str, int | list[int]] = {
        f"{name}_id": vocabulary.named[name]
        for name in ("bos_token", "pad_token")
        if name in vocabulary.named
    }
    if ends := end_ids(metadata, vocabulary):
        ids["eos_token_id"] = ends
    return ids


def chat_templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """Returns the chat template, or a list of named ones where there are several, as in a
    tokenizer_config.json. Raises Refused."""
    found: dict[str, str] = {}
    for key, value in metadata.items():
        if key != TEMPLATE_KEY and not key.startswith(f"{TEMPLATE_KEY}."):
            continue
        if not isinstance(value, str) or len(value) > MAX_TEMPLATE_BYTES:
            raise Refused(f"has no text of up to {MAX_TEMPLATE_BYTES} characters for {key:.80}")
        found[key.removeprefix(TEMPLATE_KEY).removeprefix(".") or DEFAULT] = value
        if len(found) > MAX_TEMPLATES:
            raise Refused(f"has more than {MAX_TEMPLATES} chat templates")
    if found.keys() <= {DEFAULT}:
        return found.get(DEFAULT)
    return [{"name": name, "template": template} for name, template in found.items()]


def _read(metadata: Mapping[str, Any]) -> tuple[str, Vocabulary]:
    kind = metadata.get(f"{PREFIX}model")
    if not isinstance(kind, str) or kind not in _DEFAULT_IDS:
        known = ", ".join(_DEFAULT_IDS)
        what = "no tokenizer" if kind is None else f"a tokenizer of the kind {kind!r:.40}"
        raise Refused(f"has {what} ({PREFIX}model); those that are read are {known}; {ADVICE}")
    return kind, read_vocabulary(metadata, _DEFAULT_IDS[kind])


def _byte_level(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[Json, bool]:
    """Returns a byte-level BPE, and whether its texts begin with BOS unless the file says so."""
    name = metadata.get(f"{PREFIX}pre")
    splitting = SPLITTINGS.get(name) if isinstance(name, str) else None
    if splitting is None:
        raise Refused(
            f"has {name!r:.40} for {PREFIX}pre, an unknown way to split texts; {ADVICE}. Known are"
            f" {', '.join(SPLITTINGS)}"
        )
    model = _bpe(vocabulary.ids, read_merges(metadata, vocabulary.ids))
    model["ignore_merges"] = splitting.takes_whole and not _makes_special(splitting, vocabulary)
    description = {
        "normalizer": {"type": splitting.normalizer} if splitting.normalizer else None,
        "pre_tokenizer": splitting.pre_tokenizer(),
        "decoder": byte_level_step(add_prefix_space=True),
        "model": model,
    }
    return description, splitting.begins_with_bos


def _makes_special(splitting: Splitting, vocabulary: Vocabulary) -> bool:
    """Returns whether texts are split into pieces that are special tokens. The vocabulary has
    them, so that plain text would become the special token if pieces were looked up as they are."""
    from tokenizers import Tokenizer

    splits: Json = {"type": "Sequence", "pretokenizers": list(splitting.steps)}
    empty = {"model": _bpe({}, []), "pre_tokenizer": splits, "added_tokens": []}
    split = Tokenizer.from_str(json.dumps(empty)).pre_tokenizer.pre_tokenize_str
    return any(
        content == piece
        for content in (vocabulary.texts[index] for index in vocabulary.special)
        for text in (content, f"\n{content}\n", f"a{content}a", f" {content} ")
        for piece, _ in split(text)
    )


def _pieces(metadata: Mapping[str, Any], vocabulary: Vocabulary, kind: str) -> Json:
    """Returns sentencepiece's BPE: pieces with a visible space, and bytes for what has no piece."""
    ids = _spelled(vocabulary)
    if kind == "gemma4" or metadata.get(f"{PREFIX}merges"):
        merges = read_merges(metadata, ids)
    else:
        merges = _merges_of_scores(vocabulary, ids)
    model = _bpe(ids, merges) | {"fuse_unk": True, "byte_fallback": True}
    if "unk_token" in vocabulary.named:
        model["unk_token"] = vocabulary.texts[vocabulary.named["unk_token"]]
    has_space = flag(metadata, "add_space_prefix", kind == "llama")
    steps: list[Json] = [{"type": "Prepend", "prepend": SPACE}] if has_space else []
    steps.append(_replace(" ", SPACE))
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": _spaces_and_bytes(has_space),
        "model": model,
    }


def _unigram(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Json:
    """Returns sentencepiece's unigram model."""
    unknown = vocabulary.named.get("unk_token")
    if unknown is None or not vocabulary.scores:
        raise Refused(f"has no {PREFIX}scores, or no token for what is unknown; {ADVICE}")
    scores = [
        score
        for score, kind in zip(vocabulary.scores, vocabulary.kinds, strict=False)
        if kind is Kind.NORMAL
    ]
    lowest = min(scores, default=0.0)  # an id without a token must not lower what is unknown costs
    pieces = [
        [text, vocabulary.scores[index]] if text else [f"[PAD{index}]", lowest]
        for index, text in enumerate(vocabulary.texts)
    ]
    normalizers: list[Json] = []
    if charsmap := _charsmap(metadata):
        encoded = base64.b64encode(charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if flag(metadata, "remove_extra_whitespaces", False):
        normalizers += [
            _replace(r"\A +| +\z", "", key="Regex"),
            _replace(" {2,}", " ", key="Regex"),
        ]
    has_space = flag(metadata, "add_space_prefix", False)
    if has_space:  # also before a space, unlike Metaspace's own
        normalizers.append({"type": "Prepend", "prepend": SPACE})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": "never",
            "split": True,
        },
        "decoder": _spaces_and_bytes(has_space),
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": pieces,
            "byte_fallback": Kind.BYTE in vocabulary.kinds,
        },
    }


def _charsmap(metadata: Mapping[str, Any]) -> bytes:
    items = metadata.get(f"{PREFIX}precompiled_charsmap", [])
    if not isinstance(items, list | bytes) or len(items) > MAX_CHARSMAP_BYTES:
        raise Refused(f"has no list of up to {MAX_CHARSMAP_BYTES} bytes for precompiled_charsmap")
    if not all(type(item) is int and -128 <= item < 256 for item in items):
        raise Refused("has values in precompiled_charsmap that are not bytes")
    return bytes(item & 255 for item in items)


def _spelled(vocabulary: Vocabulary) -> dict[str, int]:
    """Returns the ids by the pieces' own spelling: converters write the spaces of a user's tokens
    as spaces."""
    ids = dict(vocabulary.ids)
    for index in vocabulary.special:
        text = vocabulary.texts[index]
        if vocabulary.is_own(index) and not text.strip(" ") and SPACE * len(text) not in ids:
            del ids[text]
            ids[SPACE * len(text)] = index
    return ids


def _merges_of_scores(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[list[str]]:
    """Returns each way to make a piece of two others: a user's own pieces first, then those of the
    highest score. Pieces of one score are in the order of their ids, and so are a piece's ways."""
    if not vocabulary.scores:
        raise Refused(f"has neither {PREFIX}scores nor {PREFIX}merges; {ADVICE}")
    kinds = (Kind.NORMAL, Kind.UNDEFINED, Kind.UNUSED, Kind.USER_DEFINED)
    pieces = {text: at for text, at in ids.items() if vocabulary.kinds[at] in kinds}
    if sum(len(piece) ** 2 for piece in pieces) > MAX_SQUARES:
        raise Refused("has too many long tokens")

    def rank(piece: str) -> tuple[float, int]:
        at = pieces[piece]
        is_own = vocabulary.kinds[at] is Kind.USER_DEFINED
        return (float("-inf") if is_own else -vocabulary.scores[at]), at

    merges: list[list[str]] = []
    for piece in sorted(pieces, key=rank):
        merges += sorted(_halves(piece, pieces), key=lambda pair: [pieces[half] for half in pair])
        if len(merges) > MAX_MERGES:
            raise Refused(f"has more than {MAX_MERGES} ways to merge its tokens")
    return merges


def _halves(piece: str, pieces: Mapping[str, int]) -> Iterator[list[str]]:
    for at in range(1, len(piece)):
        if piece[:at] in pieces and piece[at:] in pieces:
            yield [piece[:at], piece[at:]]


def _added(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> list[Json]:
    """Returns the tokens that are found before a text is split. Those of Phi-3's turns take the
    space that follows them, of which the file says nothing."""
    spelled = {at: text for text, at in _spelled(vocabulary).items()}
    is_bytes = metadata.get(f"{PREFIX}model") == "gpt2"
    is_phi3 = metadata.get("general.architecture") == "phi3" and not is_bytes
    added = []
    for index in vocabulary.special:
        content = vocabulary.texts[index] if is_bytes else spelled[index]
        token = added_token(content, index)
        token["special"] = not vocabulary.is_own(index)
        token["rstrip"] = is_phi3 and content not in ("<unk>", "<s>", "<|endoftext|>")
        added.append(token)
    return added


def _ends(vocabulary: Vocabulary, has_bos: bool, has_eos: bool) -> Json | None:
    """Returns the post-processor that puts tokens around a text."""
    if not has_bos and not has_eos:
        return None
    around = {}
    for name, is_there in (("bos_token", has_bos), ("eos_token", has_eos)):
        if is_there and name not in vocabulary.named:
            raise Refused(f"puts a {name} around texts, but does not say which one it is")
        around[name] = [vocabulary.named[name]] if is_there else []
    used = [index for ids in around.values() for index in ids]
    names = {index: vocabulary.texts[index] for index in used}

    def special(ids: list[int]) -> list[Json]:
        return [{"SpecialToken": {"id": names[index], "type_id": 0}} for index in ids]

    def text(name: str, type_id: int) -> list[Json]:
        inner: Json = {"Sequence": {"id": name, "type_id": type_id}}
        return [*special(around["bos_token"]), inner, *special(around["eos_token"])]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {
            name: {"id": name, "ids": [index], "tokens": [name]} for index, name in names.items()
        },
    }


def _bpe(ids: Mapping[str, int], merges: list[list[str]]) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(ids),
        "merges": merges,
    }


def _spaces_and_bytes(has_space: bool) -> Json:
    steps: list[Json] = [_replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if has_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _replace(pattern: str, content: str, *, key: str = "String") -> Json:
    return {"type": "Replace", "pattern": {key: pattern}, "content": content}


def _encoded(values: Json) -> str:
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise Refused("has a text in its tokenizer's keys that is not Unicode") from None
    if size > MAX_FILE_BYTES:
        raise Refused(f"has a tokenizer of {size} bytes; at most {MAX_FILE_BYTES} are used")
    return text
