"""Files of API keys, the search for a key, and reloading on SIGHUP."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import signal
import time
from pathlib import Path

import aiohttp
import pytest
import uvloop

from serve.errors import ConfigError
from serve.http import HttpServer, HttpSettings
from serve.http.edge.keys import ApiKey, KeyLimits, KeyRing, load_keys
from serve.http.server import serve_until_signal
from tests.support.http.api_keys import ALICE, BOB, KEYS, bearer, write_keys
from tests.support.http.fake_engine import FakeEngine

TOML = f"""
[[keys]]
name = "alice"
key = "{ALICE}"
requests_per_minute = 60
min_priority = -1

[[keys]]
name = "bob"
sha256 = "{hashlib.sha256(BOB.encode()).hexdigest()}"
"""
JSON = f'{{"keys": [{{"name": "alice", "key": "{ALICE}", "max_tokens": 5}}]}}'


def test_keys_of_files_and_of_the_environment(tmp_path: Path) -> None:
    keys = load_keys(write_keys(tmp_path / "keys.toml", TOML))
    assert [key.name for key in keys] == ["alice", "bob"]
    assert keys[0].limits == KeyLimits(requests_per_minute=60, min_priority=-1)
    assert [key.digest for key in keys] == [
        hashlib.sha256(text.encode()).digest() for text in (ALICE, BOB)
    ]
    assert load_keys(write_keys(tmp_path / "k.json", JSON))[0].limits == KeyLimits(max_tokens=5)
    lines = load_keys(write_keys(tmp_path / "keys", f"# old\n\n{ALICE}\nbob:{BOB}\n"))
    assert re.fullmatch("key-[0-9a-f]{8}", lines[0].name)
    assert lines[1].name == "bob"
    assert [key.name for key in load_keys(None, KEYS)] == ["alice", "bob"]
    assert load_keys(None) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("k.toml", "keys = 3", "must have exactly one list"),
        ("k.toml", "secret-text-of-a-key = ", "not valid toml"),
        ("k.toml", '[[keys]]\nname = "a"\nkey = secret-text\nx = 3', "not valid toml (line 3)"),
        ("k.json", '{"keys":\n ["secret-text-of-a-key",]}', "not valid json (line 2)"),
        ("k.json", '{"keys": ["secret-text-of-a-key"]}', "key 1 must be a table"),
        ("k.json", "[" * 100_000, "not valid json"),
        ("k.json", '{"keys": []}', "has no keys"),
        ("k.toml", '[[keys]]\nname = "a"', "either key or sha256"),
        ("k.toml", '[[keys]]\nkey = "secret"', "a key must be 16 to 256"),
        ("k.toml", f'[[keys]]\nkey = "{ALICE}"\nnome = "a"', "unknown field 'nome'"),
        ("k.toml", f'[[keys]]\nkey = "{ALICE}"\nname = "a b"', "a name must be"),
        (
            "k.toml",
            f'[[keys]]\nkey = "{ALICE}"\nmax_tokens = true',
            "max_tokens must be an int",
        ),
        ("k.toml", f'[[keys]]\nkey = "{ALICE}"\nmax_concurrent = 0', "max_concurrent must be pos"),
        ("k.toml", '[[keys]]\nsha256 = "12"', "64 hexadecimal digits"),
        ("keys", "", "has no keys"),
        ("keys", "a:secret", "line 1: a key must be"),
        ("keys", f"a:{ALICE}\nb:{ALICE}", "appears twice; the second is named b"),
        ("keys", "\xff", "a key must be"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        load_keys(write_keys(tmp_path / name, text))
    message = str(caught.value).replace(str(tmp_path), "")
    assert "secret" not in message
    assert ALICE not in message


def test_one_name_has_one_set_of_limits(tmp_path: Path) -> None:
    text = TOML.replace('name = "bob"', 'name = "alice"')
    with pytest.raises(ConfigError, match="named alice have different limits"):
        load_keys(write_keys(tmp_path / "k.toml", text))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the API key file .*No such file"):
        load_keys(str(tmp_path / "nothing"))


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True)])
def test_a_file_that_others_can_read(
    tmp_path: Path, mode: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    load_keys(write_keys(tmp_path / "keys", ALICE, mode))
    assert ("other users can read" in caplog.text) == warns
    assert ALICE not in caplog.text


@pytest.mark.row("A2")
def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search compares every key, so its time does not depend on which key is right."""
    compared: list[bytes] = []
    real = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(a)
        assert len(a) == len(b) == 32
        return real(a, b)

    monkeypatch.setattr("serve.http.edge.keys.hmac.compare_digest", counting)
    ring = KeyRing(load_keys(None, KEYS))
    for presented in (ALICE, BOB, "", "x", "ä"):
        compared.clear()
        match = ring.find(presented.encode())
        assert len(compared) == 2
        assert (match.name if match else None) == {ALICE: "alice", BOB: "bob"}.get(presented)


def test_the_search_through_many_keys_is_fast() -> None:
    """A search through a thousand keys takes less than 5 ms."""
    ring = KeyRing(ApiKey(f"k{i}", hashlib.sha256(b"%d" % i).digest()) for i in range(1000))
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        assert ring.find(b"999") is not None
        best = min(best, time.perf_counter() - start)
    assert best < 5e-3


def test_the_text_of_the_settings_has_no_keys() -> None:
    assert ALICE not in repr(HttpSettings(api_keys=KEYS))


def test_a_server_without_its_keys_does_not_start(tmp_path: Path) -> None:
    async def main() -> None:
        settings = HttpSettings(port=0, api_key_file=str(tmp_path / "nothing"))
        with pytest.raises(ConfigError, match="cannot read"):
            await HttpServer(FakeEngine(), settings).start()  # type: ignore[arg-type]

    uvloop.run(main())


def test_keys_are_read_again_on_sighup(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SIGHUP loads the file again; the keys stay as they were if it cannot be read."""
    path = tmp_path / "keys"
    write_keys(path, ALICE)
    caplog.set_level(logging.INFO)

    async def status(url: str, key: str) -> int:
        async with (
            aiohttp.ClientSession(url, headers=bearer(key)) as session,
            session.get("/v1/models") as response,
        ):
            return response.status

    async def after_hangup(url: str, text: str) -> tuple[int, int]:
        write_keys(path, text)
        number = len(caplog.records)
        os.kill(os.getpid(), signal.SIGHUP)
        while len(caplog.records) == number:
            await asyncio.sleep(0.01)
        return await status(url, ALICE), await status(url, BOB)

    async def main() -> None:
        settings = HttpSettings(port=0, api_key_file=str(path))
        server = HttpServer(FakeEngine(), settings)  # type: ignore[arg-type]
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve_until_signal(server, on_ready=ready.set_result))
        url = await ready
        assert (await status(url, ALICE), await status(url, BOB)) == (200, 401)
        assert await after_hangup(url, f"{ALICE}\n{BOB}") == (200, 200)
        assert await after_hangup(url, BOB) == (401, 200)
        assert await after_hangup(url, "broken") == (401, 200)
        assert "the API keys stay as they were" in caplog.text
        os.kill(os.getpid(), signal.SIGTERM)
        await serving

    uvloop.run(main())
    assert ALICE not in caplog.text
    assert BOB not in caplog.text
