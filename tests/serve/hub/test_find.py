"""A model is found by a path or a name: here first, without the network, else on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.errors import ConfigError, DownloadError, ModelLoadError
from serve.hub.cache import cached_models
from serve.hub.find import ModelLocation, find
from serve.hub.name import HubName
from serve.hub.pull import pull
from tests.support.hub.models import WEIGHTS, plain_files, settings_of
from tests.support.hub.server import FakeHub

QUANTS = {
    "m-Q4_K_M.gguf": b"4" * 1000,
    "m-Q8_0-00001-of-00002.gguf": b"8" * 1000,
    "m-Q8_0-00002-of-00002.gguf": b"9" * 1000,
}


def snapshot(cache: Path, name: str, commit: str = "a" * 40) -> Path:
    return cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit


def test_a_model_is_fetched_once(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", plain_files())
    told: list[str] = []
    location = find("Org/Model", tell=told.append)
    assert location == (str(snapshot(cache, "Org/Model")), "Org/Model")
    assert len(told) == 1 and "3 MiB in 3 files, to" in told[0]
    before = len(hub.seen)
    assert find("Org/Model", tell=told.append) == location
    assert find("Model") == location
    assert len(told) == 1 and len(hub.seen) == before


def test_a_path_comes_first(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cache.parent)
    Path("Org/Model").mkdir(parents=True)
    Path("Org/m.gguf").touch()
    assert find("Org/Model") == ("Org/Model", None)
    assert find("Org/m.gguf") == ("Org/m.gguf", None)
    assert not hub.seen
    with pytest.raises(ConfigError, match="revision v1: only models by their names on the hub"):
        find("Org/Model", revision="v1")


def test_gguf(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model-GGUF", dict(QUANTS))
    root = snapshot(cache, "Org/Model-GGUF")
    eight = ModelLocation(str(root / "m-Q8_0-00001-of-00002.gguf"), "Org/Model-GGUF:q8_0")
    assert find("Org/Model-GGUF:q8_0") == eight
    assert sorted(path.name for path in root.iterdir()) == sorted(QUANTS)[1:]
    assert list(cached_models()) == ["Org/Model-GGUF:Q8_0"]
    before = len(hub.seen)
    assert find("Org/Model-GGUF:q8_0") == eight
    assert find("Org/Model-GGUF").model == eight.model  # the only one that is here
    assert find("Model-GGUF:Q8_0").model == eight.model
    assert len(hub.seen) == before
    assert find("Org/Model-GGUF:Q4_K_M").model == str(root / "m-Q4_K_M.gguf")
    assert find("Org/Model-GGUF").model == str(root / "m-Q4_K_M.gguf")  # the default
    assert list(cached_models()) == ["Org/Model-GGUF:Q4_K_M", "Org/Model-GGUF:Q8_0"]


def test_a_part_that_is_missing_here_is_fetched(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model-GGUF", dict(QUANTS))
    find("Org/Model-GGUF:Q8_0")
    (snapshot(cache, "Org/Model-GGUF") / "m-Q8_0-00002-of-00002.gguf").unlink()
    assert not cached_models()
    before = len(hub.fetched())
    path = Path(find("Org/Model-GGUF:Q8_0").model)
    assert (path.parent / "m-Q8_0-00002-of-00002.gguf").exists()
    assert len(hub.fetched()) == before  # its blob is there


def test_what_other_tools_have_left_unfinished_is_completed(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", plain_files())
    root = snapshot(cache, "Org/Model")
    root.mkdir(parents=True)
    (root / "config.json").write_text("{}")
    assert (Path(find("Org/Model").model) / "model.safetensors").read_bytes() == WEIGHTS
    index = b'{"weight_map": {"a": "model.safetensors", "b": "two.safetensors"}}'
    files = plain_files(**{"model.safetensors.index.json": index, "two.safetensors": b"2"})
    hub.add("Org/Two", files)
    (Path(find("Org/Two").model) / "two.safetensors").unlink()
    assert (Path(find("Org/Two").model) / "two.safetensors").read_bytes() == b"2"


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 1}', '{"weight_map": {"a": [1]}}'])
def test_a_broken_index_is_not_a_model(hub: FakeHub, cache: Path, index: str) -> None:
    hub.add("Org/Model", plain_files())
    root = Path(find("Org/Model").model)
    (root / "model.safetensors.index.json").write_text(index)
    before = len(hub.seen)
    find("Org/Model")
    assert len(hub.seen) > before


def test_revisions(hub: FakeHub, cache: Path) -> None:
    repo = hub.add("Org/Model", plain_files())
    repo.commits |= {"v1": "b" * 40, "b" * 40: "b" * 40}
    find("Org/Model")
    assert find("Org/Model", revision="v1").model == str(snapshot(cache, "Org/Model", "b" * 40))
    before = len(hub.seen)
    assert find("Org/Model", revision="v1").model.endswith("b" * 40)
    assert find("Org/Model", revision="b" * 40).model.endswith("b" * 40)
    assert find("Org/Model").model.endswith("a" * 40)
    assert len(hub.seen) == before
    with pytest.raises(ConfigError, match="is not the name of a branch"):
        find("Org/Model", revision="../../a")
    with pytest.raises(ConfigError, match="revision v1: only models by their names"):
        find("Model", revision="v1")


def test_offline(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("Org/Model", plain_files())
    pull(HubName("Org/Model"), settings_of(hub, cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "yes")
    before = len(hub.seen)
    assert find("Org/Model").name == "Org/Model"
    with pytest.raises(DownloadError, match=r"HF_HUB_OFFLINE forbids .*; did you mean Org/Model\?"):
        find("Org/Modell")
    assert len(hub.seen) == before


def test_a_missing_model(hub: FakeHub, cache: Path) -> None:
    with pytest.raises(DownloadError, match=r"Org/Gone does not exist here, and .* has no model"):
        find("Org/Gone")
    with pytest.raises(ModelLoadError, match="downloaded by their names, as ORG/NAME"):
        find("gone")
    assert [seen.path for seen in hub.seen] == ["/api/models/Org/Gone/revision/main"]


def test_the_cache_of_the_environment(hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    from serve.hub.settings import cache_folder

    home = Path.home()
    assert cache_folder({}) == home / ".cache" / "huggingface" / "hub"
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert cache_folder({"HF_HOME": "~/h", "XDG_CACHE_HOME": "/x"}) == home / "h" / "hub"
    assert cache_folder({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/h"}) == Path("/old")
    assert cache_folder({"HF_HUB_CACHE": "/c", "HUGGINGFACE_HUB_CACHE": "/o"}) == Path("/c")
