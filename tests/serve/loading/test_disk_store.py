"""The folder of a model's K/V on disk: its owner, its statistics and logs, and its closing."""

from __future__ import annotations

import errno
import functools
import os
import time

import pytest

import serve.loading.disk_store
from memory.tiers.disk_tier import DiskTier
from serve import LLM, SamplingParams
from serve.errors import ConfigError
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.faulty_storage import faulty

SETTINGS = {
    "dtype": "int8",
    "kv_page_bytes": 4096,
    "kv_cache_bytes": 1 << 20,
    "max_model_len": 200,
    "max_num_seqs": 4,
    "kv_disk_bytes": 4 << 20,
}
PROMPT = {"prompt_token_ids": [(5 * i) % 90 + 3 for i in range(190)]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def open_llm(folder, **settings) -> LLM:
    return LLM(str(checkpoint("llama")), kv_cache_dir=str(folder), **(SETTINGS | settings))


def store_some(folder, **settings) -> None:
    with open_llm(folder, **settings) as llm:
        llm.generate(PROMPT, GREEDY)


def loaded_pages(folder) -> int:
    with open_llm(folder) as llm:
        llm.generate(PROMPT, GREEDY)
        return llm.stats().disk_loaded_pages


@pytest.fixture
def folder(tmp_path):
    """A model's folder with stored pages."""
    store_some(tmp_path)
    (folder,) = tmp_path.iterdir()
    return folder


@pytest.mark.row("X9")
def test_a_folder_that_is_a_link_is_refused(tmp_path, folder):
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"kv_cache_dir: .* is a link"):
        open_llm(tmp_path)
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    assert loaded_pages(tmp_path) >= 4


def test_a_directory_of_another_user_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    own.mkdir()
    foreign.mkdir()
    os.chown(foreign, 12345, -1)
    link = tmp_path / "link"
    link.symlink_to(own)
    store_some(link)
    assert loaded_pages(link) >= 4, "a user's own link is accepted"
    os.chown(link, 12345, -1, follow_symlinks=False)
    with pytest.raises(ConfigError, match=r"kv_cache_dir: .* is a link of another user"):
        open_llm(link)
    for mode in (0o777, 0o770, 0o1777):
        foreign.chmod(mode)
        with pytest.raises(ConfigError, match=r"kv_cache_dir: .* belongs to another user and"):
            open_llm(foreign)
    assert not list(foreign.iterdir())


def test_each_backend_has_its_own_pages(tmp_path):
    store_some(tmp_path, backend="cpu", dtype="float32")
    store_some(tmp_path, backend="reference", dtype="float32")
    assert len(list(tmp_path.iterdir())) == 2
    with open_llm(tmp_path, backend="cpu", dtype="float32") as llm:
        llm.generate(PROMPT, GREEDY)
        assert llm.stats().disk_loaded_pages >= 4


def test_each_type_of_kv_has_its_own_pages(tmp_path):
    """Pages of another type are not found, and those of the same are, after a restart."""
    with open_llm(tmp_path / "alone", kv_dtype="int4") as llm:
        expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    folder = tmp_path / "shared"
    for kv_dtype, is_found in (("int8", False), ("int4", False), ("int4", True), ("int8", True)):
        with open_llm(folder, kv_dtype=kv_dtype) as llm:
            found = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
            assert (llm.stats().disk_loaded_pages >= 2) == is_found, kv_dtype
            assert kv_dtype == "int8" or found == expected
    assert len(list(folder.iterdir())) == 2


def corrupt(path, how: str) -> None:
    if how == "open to others":
        path.chmod(0o666)
    elif how == "a link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    elif how == "too short":
        path.write_bytes(b"short")
    elif how == "another user's":
        os.chown(path, 12345, -1)


FLAWS = ["open to others", "a link", "a pipe", "another user's"]


@pytest.mark.parametrize("how", [*FLAWS, "too short"])
def test_a_secret_that_other_users_may_know_is_replaced(tmp_path, folder, how, caplog):
    """A new secret changes all page keys, so that no earlier page is found."""
    if how == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    secret = folder / "secret"
    before = secret.read_bytes()
    corrupt(secret, how)
    assert loaded_pages(tmp_path) == 0
    assert "secret is" in caplog.text and "it is replaced" in caplog.text
    assert secret.read_bytes() != before and len(secret.read_bytes()) == 32
    assert secret.lstat().st_mode & 0o777 == 0o600 and secret.lstat().st_uid == os.geteuid()
    assert loaded_pages(tmp_path) >= 4


@pytest.mark.parametrize("name", ["index", "pages-*.kv"])
@pytest.mark.parametrize("how", FLAWS)
def test_files_that_other_users_may_have_written_are_replaced(tmp_path, folder, name, how):
    if how == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    (path,) = folder.glob(name)
    corrupt(path, how)
    assert loaded_pages(tmp_path) == 0
    assert loaded_pages(tmp_path) >= 4


def test_the_pages_found_at_the_start_are_logged(tmp_path, folder, caplog):
    caplog.set_level("INFO")
    open_llm(tmp_path).shutdown()
    index = (folder / "index").read_bytes()[128:]
    num_pages = sum(index[at] == 1 for at in range(0, len(index), 64))
    assert num_pages >= 4
    size = f"{num_pages * 4096 / (1 << 20):.3g} MiB"
    assert f"{num_pages} pages of 4 KiB ({size}) found in {folder}, 4 MiB at most" in caplog.text
    assert "other folders" not in caplog.text
    open_llm(tmp_path, kv_page_bytes=8192).shutdown()
    assert f"0 pages of 8 KiB (0 MiB) found in {tmp_path}" in caplog.text
    assert "1 other folders of this model are there" in caplog.text
    assert f"{folder.name} (pages of 4 KiB)" in caplog.text


def test_two_page_sizes_in_one_directory_at_once(tmp_path, folder):
    """Each has its folder, and neither touches the other's pages. Only one uses a folder."""
    with open_llm(tmp_path) as first, open_llm(tmp_path, kv_page_bytes=8192) as second:
        assert second.stats().disk_pages == 0 and first.stats().disk_pages >= 4
        second.generate(PROMPT, GREEDY)
        with pytest.raises(ConfigError, match=f"kv_cache_dir: {folder} is in use by another"):
            open_llm(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert loaded_pages(tmp_path) >= 4


@pytest.mark.parametrize("content", [b"", b"MSKVSPIL", bytes(200)])
def test_another_folder_without_an_index_is_named(tmp_path, folder, caplog, content):
    caplog.set_level("INFO")
    (folder / "index").write_bytes(content)
    open_llm(tmp_path, kv_page_bytes=8192).shutdown()
    assert f"{folder.name} (no index)" in caplog.text


def test_the_disk_tier_is_in_the_statistics(tmp_path, monkeypatch):
    """The first of three pages is loaded, the second was torn, the third cannot be read."""
    faults = {("write", 1): "torn"}
    opener, _ = faulty(lambda kind, number: faults.get((kind, number)))
    store = functools.partial(DiskTier, open_file=opener)
    monkeypatch.setattr(serve.loading.disk_store, "DiskTier", store)
    store_some(tmp_path, kv_page_bytes=8192)
    faults["read", 2] = errno.EIO
    with open_llm(tmp_path, kv_page_bytes=8192) as llm:
        stats = llm.stats()
        assert (stats.disk_pages, stats.disk_bytes) == (3, 3 * 8192)
        llm.generate(PROMPT, GREEDY)
        stats = llm.stats()
        assert (stats.disk_loaded_pages, stats.disk_lost_pages) == (1, 2)
        assert (stats.disk_corrupt_pages, stats.disk_read_errors) == (1, 1)
        assert stats.disk_pages == 1 or stats.disk_stored_pages > 0, "rewritten"
    assert llm.stats().disk_pages == 0, "the tier is closed"


def test_pages_are_stored_once_a_failing_disk_recovers(tmp_path, monkeypatch):
    broken = [True]
    opener, _ = faulty(lambda kind, n: errno.EIO if kind == "write" and broken[0] else None)
    store = functools.partial(DiskTier, open_file=opener)
    monkeypatch.setattr(serve.loading.disk_store, "DiskTier", store)
    with open_llm(tmp_path) as llm:
        llm.generate(PROMPT, GREEDY)
        end_s = time.monotonic() + 20
        while llm.stats().disk_failed_pages < 3 and time.monotonic() < end_s:
            time.sleep(0.02)
        stats = llm.stats()
        assert stats.disk_write_errors >= 3 and stats.disk_failed_pages >= 3
        assert stats.disk_is_paused
        assert stats.disk_stored_pages == stats.disk_pages == 0
        broken[0] = False
        while llm.stats().disk_stored_pages < 4 and time.monotonic() < end_s:
            time.sleep(0.02)
        assert llm.stats().disk_stored_pages >= 4 and llm.stats().pages_in_use == 0
    assert loaded_pages(tmp_path) >= 4


def test_the_device_is_closed_when_freeing_kv_memory_fails(caplog):
    """The threads end as well."""
    llm = LLM(str(checkpoint("llama")), **SETTINGS)
    llm.generate(PROMPT, GREEDY)
    core = llm._loaded.core
    closed = []
    close = core._runner.close
    core._runner.close = lambda: (close(), closed.append(True))

    def fail() -> None:
        raise OSError(errno.EIO, "the accounting is broken")

    core.kv.close_all = fail
    llm.shutdown()
    assert closed and "the accounting is broken" in caplog.text
    assert not core._compute.is_alive() and not core._output.is_alive()
