"""Which files of a repository a model needs. Nothing that can hold code is ever among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from serve.errors import DownloadError
from serve.hub.cache import CONFIG, INDEX
from serve.hub.listing import Listing, RepoFile
from serve.single_file.names import DEFAULT_QUANT, GgufModel, gguf_models, matching, names
from serve.units import format_memory

SINGLE = "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tekken.json", "tiktoken.model", "tokenizer.model")
_SMALL = (
    CONFIG,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    *TOKENIZERS,
)
MAX_SMALL_BYTES = 256 << 20
MAX_WEIGHT_FILES = 10_000
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_LISTED = 30


class Wanted(NamedTuple):
    """files: what is fetched. first: the path of the first GGUF file, or "" for a directory."""

    files: tuple[RepoFile, ...]
    first: str = ""


def wanted_files(
    listing: Listing, choice: str | None, read_index: Callable[[RepoFile], dict[str, Any]]
) -> Wanted:
    """Returns the files of the model, or of the GGUF file or quantization that is chosen.

    read_index: fetches and reads the index of the safetensors files. DownloadError if there is
    nothing that can be served, or if several models match.
    """
    has_safetensors = any(_at_top(path, ".safetensors") for path in listing.files)
    models = gguf_models({file.path: file.size for file in listing.files.values()})
    if choice is not None or (models and not (has_safetensors and CONFIG in listing.files)):
        model = _chosen(listing.repository, models, choice)
        return Wanted(tuple(listing.files[path] for path in model.paths), model.paths[0])
    if not has_safetensors:
        raise _no_weights(listing)
    if CONFIG not in listing.files:
        raise DownloadError(
            f"{listing.repository} has no {CONFIG} beside its weights, so it is not a language"
            " model that can be served alone (an adapter, for example)",
            code="choice",
        )
    return Wanted((*_small_files(listing), *_weights(listing, read_index)))


def _chosen(repository: str, models: Sequence[GgufModel], choice: str | None) -> GgufModel:
    if not models:
        raise DownloadError(
            f"{repository} has no GGUF files, so {choice!r} cannot be chosen; leave it out",
            code="choice",
        )
    found = matching(models, choice or DEFAULT_QUANT)
    if choice is None and not found and len(models) == 1:
        found = list(models)
    if len(found) != 1:
        how = "several match" if found else "none matches"
        which = f"{choice!r}" if choice else f"the default, {DEFAULT_QUANT}"
        raise DownloadError(
            f"{repository} has these GGUF models, of which {how} {which}; add a name:\n"
            + _list(repository, found or models),
            code="choice",
        )
    if not found[0].is_whole:
        raise DownloadError(
            f"{repository} has only {len(found[0].paths)} parts of {found[0].stem}", code="choice"
        )
    return found[0]


def _list(repository: str, models: Sequence[GgufModel]) -> str:
    lines = [
        f"  {repository}:{name}  {format_memory(model.size_bytes)}"
        for name, model in list(names(models).items())[:_MAX_LISTED]
    ]
    more = len(models) - len(lines)
    return "\n".join([*lines, f"  and {more} more"] if more else lines)


def _no_weights(listing: Listing) -> DownloadError:
    pickled = [path for path in sorted(listing.files) if path.endswith(_PICKLED)]
    if pickled:
        text = (
            f"{listing.repository} has its weights only as {pickled[0]}, which can run code when it"
            " is opened and is never fetched; take a repository with safetensors or GGUF files"
        )
    else:
        text = f"{listing.repository} has neither safetensors nor GGUF files"
    return DownloadError(text, code="choice")


def _small_files(listing: Listing) -> list[RepoFile]:
    files = [file for path, file in listing.files.items() if _is_small(path)]
    for file in files:
        if file.size > MAX_SMALL_BYTES:
            raise DownloadError(
                f"{listing.repository} lists {format_memory(file.size)} for {file.path};"
                f" at most {format_memory(MAX_SMALL_BYTES)} are fetched",
                code="refused",
            )
    return files


def _is_small(path: str) -> bool:
    templates = "additional_chat_templates/"
    return (
        path in _SMALL
        or _at_top(path, ".tiktoken")
        or (path.startswith(templates) and _at_top(path.removeprefix(templates), ".jinja"))
    )


def _weights(
    listing: Listing, read_index: Callable[[RepoFile], dict[str, Any]]
) -> tuple[RepoFile, ...]:
    """Returns the files that the index names, or the only one, by the rule by which a directory is
    served."""
    index = listing.files.get(INDEX)
    if index is None:
        found = [path for path in listing.files if _at_top(path, ".safetensors")]
        if SINGLE in found:
            return (listing.files[SINGLE],)
        if len(found) == 1:
            return (listing.files[found[0]],)
        raise DownloadError(
            f"{listing.repository} has several .safetensors files but no {INDEX}", code="choice"
        )
    weight_map = read_index(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad_index(listing, "holds no weight_map")
    paths = set()
    for path in weight_map.values():
        if not isinstance(path, str) or not _at_top(path, ".safetensors"):
            raise _bad_index(listing, f"names {str(path)[:80]!r}, which is no file of weights")
        if path not in listing.files:
            raise _bad_index(listing, f"names {path[:80]!r}, which the repository does not have")
        paths.add(path)
    if len(paths) > MAX_WEIGHT_FILES:
        raise _bad_index(listing, f"names more than {MAX_WEIGHT_FILES:,} files")
    return (index, *(listing.files[path] for path in sorted(paths)))


def _bad_index(listing: Listing, what: str) -> DownloadError:
    return DownloadError(f"{listing.repository}: {INDEX} {what}", code="refused")


def _at_top(path: str, ending: str) -> bool:
    return "/" not in path and path.endswith(ending)
