"""A model is fetched from a hub into the cache, whatever happens on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web

from serve.errors import ConfigError, DownloadError
from serve.hub import pull as pull_module
from serve.hub import transfer
from serve.hub.name import HubName
from serve.hub.pull import pull
from tests.support.hub.models import WEIGHTS, llama_files, plain_files, settings_of
from tests.support.hub.server import TOKEN, FakeHub, Sent, answered, cut_off, partial_of

NAME = HubName("Org/Model")
COMMIT = "a" * 40


def blobs(cache: Path) -> Path:
    return cache / "models--Org--Model" / "blobs"


def test_only_what_is_needed_is_fetched(hub: FakeHub, cache: Path) -> None:
    files = llama_files()
    hub.add("Org/Model", files)
    told: list[str] = []
    path = pull(NAME, settings_of(hub, cache), tell=told.append)
    assert path == cache / "models--Org--Model" / "snapshots" / COMMIT
    fetched = {item.name for item in path.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= fetched
    assert not {"modeling_x.py", "pytorch_model.bin", "README.md", "original"} & fetched
    for item in path.iterdir():
        assert item.is_symlink() and item.read_bytes() == files[item.name]
    assert (cache / "models--Org--Model" / "refs" / "main").read_text() == COMMIT
    (text,) = told
    assert hub.url in text and "downloading Org/Model from" in text and str(cache) in text


def test_the_library_of_the_hub_finds_what_was_fetched(hub: FakeHub, cache: Path) -> None:
    import huggingface_hub

    hub.add("Org/Model", plain_files())
    path = pull(NAME, settings_of(hub, cache))
    snapshot = huggingface_hub.snapshot_download(
        "Org/Model", cache_dir=cache, local_files_only=True
    )
    assert Path(snapshot) == path
    (repo,) = huggingface_hub.scan_cache_dir(cache).repos
    assert repo.repo_id == "Org/Model" and repo.nb_files == 3
    # and it need not fetch what is there when it asks the hub
    before = len(hub.fetched())
    found = huggingface_hub.hf_hub_download(
        "Org/Model", "model.safetensors", cache_dir=cache, endpoint=hub.url
    )
    assert Path(found).read_bytes() == WEIGHTS and len(hub.fetched()) == before


def test_what_is_there_is_not_fetched_again(hub: FakeHub, cache: Path) -> None:
    repo = hub.add("Org/Model", plain_files())
    settings = settings_of(hub, cache)
    pull(NAME, settings)
    ref = cache / "models--Org--Model" / "refs" / "main"
    written_ns = ref.stat().st_mtime_ns
    told: list[str] = []
    assert pull(NAME, settings, tell=told.append).name == COMMIT
    assert ref.stat().st_mtime_ns == written_ns
    assert len(hub.fetched()) == 1 and not told
    # a new commit with other weights: only these are fetched
    repo.commits["main"] = "b" * 40
    repo.commits["b" * 40] = "b" * 40
    repo.files["model.safetensors"] = Sent("model.safetensors", WEIGHTS[::-1])
    new = pull(NAME, settings)
    assert new.name == "b" * 40 and (new / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    resolved = [seen.path for seen in hub.seen if "/resolve/" in seen.path]
    assert len([path for path in resolved if path.endswith("config.json")]) == 1


def test_revisions(hub: FakeHub, cache: Path) -> None:
    repo = hub.add("Org/Model", plain_files())
    repo.commits["refs/pr/1"] = "c" * 40
    repo.commits["c" * 40] = "c" * 40
    path = pull(NAME, settings_of(hub, cache), revision="refs/pr/1")
    assert path.name == "c" * 40
    refs = cache / "models--Org--Model" / "refs"
    assert (refs / "refs" / "pr" / "1").read_text() == "c" * 40 and not (refs / "main").exists()
    assert pull(NAME, settings_of(hub, cache), revision="c" * 40) == path
    with pytest.raises(DownloadError, match="has no revision v9 on") as caught:
        pull(NAME, settings_of(hub, cache), revision="v9")
    assert caught.value.code == "revision"
    with pytest.raises(ConfigError, match="is not the name of a branch"):
        pull(NAME, settings_of(hub, cache), revision="../../x")


@pytest.mark.parametrize("after", [1, 1 << 20, len(WEIGHTS) - 1])
def test_a_lost_connection_goes_on_where_it_was(hub: FakeHub, cache: Path, after: int) -> None:
    hub.add("Org/Model", plain_files())
    hub.faults.append(cut_off(".safetensors", after))
    path = pull(NAME, settings_of(hub, cache))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert [seen.range for seen in hub.fetched()] == [None, f"bytes={after}-"]


def test_a_download_goes_on_after_an_end(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", plain_files())
    hub.faults.append(cut_off(".safetensors", 1000, times=6))
    with pytest.raises(DownloadError, match=r"failed .peer closed connection") as caught:
        pull(NAME, settings_of(hub, cache))
    assert caught.value.code == "network"
    assert not (cache / "models--Org--Model" / "snapshots").exists()
    (part,) = blobs(cache).glob("*.incomplete")
    assert part.stat().st_size == 6000
    told: list[str] = []
    path = pull(NAME, settings_of(hub, cache), tell=told.append)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched()[-1].range == "bytes=6000-"
    assert "5.86 KiB of it are here already" in told[0]
    assert not list(blobs(cache).glob("*.incomplete"))


def test_a_hub_without_ranges(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", plain_files())
    hub.faults.append(cut_off(".safetensors", 5000))
    hub.faults.append(answered(".safetensors", lambda sent, _: web.Response(body=sent.body)))
    path = pull(NAME, settings_of(hub, cache))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_large_files_are_asked_for_in_parts(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_REQUEST_BYTES", 1 << 20)
    hub.add("Org/Model", plain_files())
    path = pull(NAME, settings_of(hub, cache))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    ranges = ["bytes=0-1048575", "bytes=1048576-2097151", "bytes=2097152-"]
    assert [seen.range for seen in hub.fetched()] == ranges


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damage_is_found_and_removed(hub: FakeHub, cache: Path, name: str) -> None:
    def damaged(sent: Sent, request: web.Request) -> web.Response:
        return partial_of(Sent(sent.path, b"?" + sent.body[1:]), request, {})

    repo = hub.add("Org/Model", plain_files())
    hub.faults.append(answered(name, damaged))
    with pytest.raises(DownloadError, match="is damaged: its checksum is not") as caught:
        pull(NAME, settings_of(hub, cache))
    assert caught.value.code == "damaged"
    assert not list(blobs(cache).glob(f"{repo.files[name].digest}*"))
    hub.faults.clear()
    assert (pull(NAME, settings_of(hub, cache)) / "config.json").read_bytes() == b"{}"


def test_a_damaged_beginning_is_fetched_again(hub: FakeHub, cache: Path) -> None:
    repo = hub.add("Org/Model", plain_files())
    blobs(cache).mkdir(parents=True)
    digest = repo.files["model.safetensors"].digest
    (blobs(cache) / f"{digest}.incomplete").write_bytes(b"\0" * 4096)
    path = pull(NAME, settings_of(hub, cache))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert [seen.range for seen in hub.fetched()] == ["bytes=4096-", None]


def test_a_beginning_that_is_too_long_is_dropped(hub: FakeHub, cache: Path) -> None:
    repo = hub.add("Org/Model", plain_files())
    blobs(cache).mkdir(parents=True)
    digest = repo.files["model.safetensors"].digest
    (blobs(cache) / f"{digest}.incomplete").write_bytes(b"\0" * (len(WEIGHTS) + 1))
    path = pull(NAME, settings_of(hub, cache))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_the_token_goes_to_the_hub_only(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", plain_files(), access="gated")
    pull(NAME, settings_of(hub, cache, token=TOKEN))
    assert {seen.authorization for seen in hub.seen if seen.port == hub.ports[0]} == {
        f"Bearer {TOKEN}"
    }
    assert {seen.authorization for seen in hub.seen if seen.port == hub.ports[1]} == {None}


def test_too_small_a_disk(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("Org/Model", plain_files())
    free = type("Usage", (), {"free": len(WEIGHTS) + pull_module.LEFT_FREE_BYTES})
    monkeypatch.setattr(pull_module.shutil, "disk_usage", lambda path: free)
    with pytest.raises(DownloadError, match=r"needs 3 MiB more, and 259 MiB are free") as caught:
        pull(NAME, settings_of(hub, cache))
    assert caught.value.code == "disk" and not cache.exists() and not hub.fetched()


def test_a_full_disk_keeps_what_is_there(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("Org/Model", plain_files())
    write = transfer._write

    def full(out: object, chunk: bytes) -> None:
        if out.tell() > 1 << 20:  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        write(out, chunk)

    monkeypatch.setattr(transfer, "_write", full)
    with pytest.raises(DownloadError, match=r"the disk of .* is full, and .* are missing"):
        pull(NAME, settings_of(hub, cache))
    monkeypatch.setattr(transfer, "_write", write)
    assert (pull(NAME, settings_of(hub, cache)) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched()[-1].range is not None


def test_a_cache_that_cannot_be_written(hub: FakeHub, tmp_path: Path, cache: Path) -> None:
    hub.add("Org/Model", plain_files())
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match=r"cannot write to the cache .*Not a directory"):
        pull(NAME, settings_of(hub, tmp_path / "file" / "hub"))
