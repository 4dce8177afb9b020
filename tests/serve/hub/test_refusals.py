"""What a hub refuses, what it lists wrongly, and what it sends wrongly."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from serve.errors import ConfigError, DownloadError
from serve.hub import client, transfer
from serve.hub import pull as pull_module
from serve.hub.name import HubName
from serve.hub.pull import pull
from serve.hub.settings import read_settings
from tests.support.hub.models import WEIGHTS, plain_files, settings_of
from tests.support.hub.server import TOKEN, FakeHub, Sent, answered, refused

NAME = HubName("Org/Model")


def refusal(hub: FakeHub, cache: Path, **settings: Any) -> DownloadError:
    """Returns the error of a pull. Nothing that counts as a model, and no token in the message."""
    with pytest.raises(DownloadError) as caught:
        pull(NAME, settings_of(hub, cache, **settings))
    assert TOKEN not in str(caught.value)
    assert not list(cache.glob("models--*/snapshots/*/config.json"))
    assert {path.name for path in cache.parent.iterdir()} <= {"hub"}
    return caught.value


@pytest.mark.parametrize(
    ("access", "token", "code", "text"),
    [
        ("gated", None, "gated", r"ask for access at .*/Org/Model, and .* HF_TOKEN"),
        ("gated", "hf_of_another_account", "gated", "the account of the token .* no access yet"),
        ("private", None, "not_found", "no model Org/Model, or it is private; .* set HF_TOKEN"),
        ("private", "hf_of_another_account", "not_found", "use the token of an account"),
        ("public", "hf_expired", "token", "HF_TOKEN.* is wrong or has expired; make a new one"),
    ],
)
def test_access(
    hub: FakeHub, cache: Path, access: str, token: str | None, code: str, text: str
) -> None:
    hub.add("Org/Model", plain_files(), access=access)
    error = refusal(hub, cache, token=token)
    assert error.code == code
    with pytest.raises(DownloadError, match=text):
        raise error


def test_a_missing_model(hub: FakeHub, cache: Path) -> None:
    assert refusal(hub, cache).code == "not_found"
    assert refusal(hub, cache, token=TOKEN).code == "not_found"


def test_a_forbidden_model_without_the_token_that_the_hub_repeats(
    hub: FakeHub, cache: Path
) -> None:
    said = {"error": f"no, {TOKEN} \x1b[2J must not"}
    hub.answers["Org/Model"] = lambda: web.json_response(said, status=403)
    error = refusal(hub, cache, token=TOKEN)
    assert error.code == "forbidden" and "no, *** " in str(error) and "\x1b" not in str(error)


def test_nothing_that_is_secret_is_logged(
    hub: FakeHub, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("Org/Model", plain_files(), access="gated")
    with caplog.at_level(logging.DEBUG):
        settings = settings_of(hub, cache, token=TOKEN)
        pull(NAME, settings)
    assert TOKEN not in caplog.text + repr(settings) and "Signature" not in caplog.text


@pytest.mark.parametrize(("status", "code"), [(429, "rate_limited"), (503, "server")])
def test_a_busy_hub_is_asked_again(hub: FakeHub, cache: Path, status: int, code: str) -> None:
    hub.add("Org/Model", plain_files())
    hub.faults.append(answered("config.json", lambda *_: refused(status, None, "busy"), times=5))
    assert (pull(NAME, settings_of(hub, cache)) / "config.json").exists()
    hub.answers["Org/Model"] = lambda: refused(status, None, "busy")
    with pytest.raises(DownloadError) as caught:
        pull(NAME, settings_of(hub, cache))
    assert caught.value.code == code


def test_the_pause_that_a_hub_asks_for(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(client.HubClient, "wait", lambda self, seconds: waits.append(seconds))
    busy = {"Retry-After": "7"}
    hub.answers["Org/Model"] = lambda: refused(429, None, "busy", **busy)
    assert "try again in 7 s, or set HF_TOKEN" in str(refusal(hub, cache))
    limit = {"RateLimit": '"api";r=0;t=55'}
    hub.answers["Org/Model"] = lambda: refused(429, None, "busy", **limit)
    assert "try again in 55 s" in str(refusal(hub, cache))
    assert waits == [7, 7, 55, 55]
    busy["Retry-After"] = "3600"  # longer than the client waits between two tries
    hub.answers["Org/Model"] = lambda: refused(429, None, "busy", **busy)
    assert "try again in 3600 s" in str(refusal(hub, cache)) and len(waits) == 4


def test_no_network(hub: FakeHub, cache: Path) -> None:
    error = refusal(hub, cache, endpoint="http://127.0.0.1:9")
    assert error.code == "network"
    assert "connection to 127.0.0.1:9 failed (Connection refused); check the network" in str(error)


def test_offline(hub: FakeHub, cache: Path) -> None:
    error = refusal(hub, cache, is_offline=True)
    assert error.code == "offline" and not hub.seen


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda answer: answer.pop("sha"), "no commit"),
        (lambda answer: answer.update(sha="../../x"), "no commit"),
        (lambda answer: answer.pop("siblings"), "no list of at most"),
        (lambda answer: answer.update(siblings=[{}] * 100_001), "no list of at most"),
        (lambda answer: answer["siblings"].append(1), "a file without a path"),
        (lambda answer: answer["siblings"].append({"rfilename": "../x"}), "outside the repository"),
        (lambda answer: answer["siblings"].append({"rfilename": "/x"}), "outside the repository"),
        (lambda answer: answer["siblings"][0].update(size=-1), "no possible size of"),
        (lambda answer: answer["siblings"][0].update(size=1.5), "no possible size of"),
        (lambda answer: answer["siblings"][0].update(size=1 << 60), "no possible size of"),
        (lambda answer: answer["siblings"][0].update(blobId="../../x"), "no checksum of"),
        (lambda answer: answer["siblings"][0].pop("blobId"), "no checksum of"),
        (lambda answer: answer["siblings"][2]["lfs"].update(sha256="0" * 63), "no checksum of"),
        (lambda answer: answer["siblings"][0].update(size=1 << 30), "for config.json; at most"),
    ],
)
def test_listings(
    hub: FakeHub, cache: Path, edit: Callable[[dict[str, Any]], object], text: str
) -> None:
    hub.add("Org/Model", plain_files())
    hub.edit = edit
    error = refusal(hub, cache)
    assert error.code == "refused" and text in str(error)
    assert not cache.exists()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"[" * 100_000, b'{"sha": 1}', b"\xff"])
def test_answers_that_are_no_listing(hub: FakeHub, cache: Path, body: bytes) -> None:
    hub.answers["Org/Model"] = lambda: web.Response(body=body)
    assert refusal(hub, cache).code == "refused"


def test_names_that_other_systems_do_not_take_are_left_out(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", plain_files())
    names = ("a\\b.jinja", "c:d.tiktoken", "e\n.tiktoken", "x" * 300 + ".tiktoken")
    hub.edit = lambda answer: answer["siblings"].extend({"rfilename": name} for name in names)
    path = pull(NAME, settings_of(hub, cache))
    assert len(list(path.iterdir())) == 3


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "x.bin", "gone.safetensors", 1]
)
def test_an_index_that_names_other_files(hub: FakeHub, cache: Path, name: object) -> None:
    index = json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}).encode()
    hub.add("Org/Model", plain_files(**{"model.safetensors.index.json": index}))
    error = refusal(hub, cache)
    assert error.code == "refused" and "model.safetensors.index.json names" in str(error)


def test_an_answer_without_end(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(sent: Sent, request: web.Request) -> web.StreamResponse | None:
        if not sent.path.endswith(".safetensors"):
            return None
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        while True:
            await response.write(WEIGHTS)

    repo = hub.add("Org/Model", plain_files())
    hub.faults.append(endless)
    error = refusal(hub, cache)
    assert error.code == "refused" and "sends more than the 3145728 bytes" in str(error)
    assert not list(cache.rglob(f"{repo.files['model.safetensors'].digest}*.incomplete"))
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1 << 20)
    hub.answers["Org/Model"] = lambda: web.Response(body=b" " * (2 << 20))
    assert "answers with more than 1 MiB" in str(refusal(hub, cache))


def test_an_error_without_end(hub: FakeHub, cache: Path) -> None:
    hub.answers["Org/Model"] = lambda: web.Response(status=400, body=b" " * (64 << 20))
    started_s = time.monotonic()
    assert "(400)" in str(refusal(hub, cache))
    assert time.monotonic() - started_s < 5


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda sent, _: web.Response(body=sent.body[:-1]), "sends 3145727 bytes of it and lists"),
        (lambda sent, _: web.Response(body=sent.body + b"x"), "sends 3145729 bytes of it and"),
        (
            lambda sent, _: web.Response(
                status=206, body=sent.body, headers={"Content-Range": "bytes 1-3145728/3145729"}
            ),
            "sends another part of it",
        ),
        (
            lambda sent, _: web.Response(
                status=206, body=sent.body, headers={"Content-Range": "bytes 0-3145727/9999999"}
            ),
            "has 9999999 bytes of it and lists",
        ),
        (
            lambda sent, _: web.Response(body=sent.body, headers={"Content-Encoding": "zstd"}),
            "compresses its answer",
        ),
        (lambda sent, _: web.Response(status=204), "answers 204, which no hub does"),
    ],
)
def test_sizes_that_lie(
    hub: FakeHub, cache: Path, make: Callable[[Sent, web.Request], web.Response], text: str
) -> None:
    repo = hub.add("Org/Model", plain_files())
    hub.faults.append(answered(".safetensors", make))
    error = refusal(hub, cache)
    assert error.code == "refused" and text in str(error)
    assert not list(cache.rglob(f"{repo.files['model.safetensors'].digest}*.incomplete"))


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("/Org/Model/resolve/{commit}/config.json", "redirects more than 5 times"),
        ("file:///etc/passwd", "redirects to no address of the web"),
        ("http://user:secret@host/", "redirects to no address of the web"),
        ("http://host:99999/", "redirects to no address of the web"),
        ("", "redirects more than 5 times"),
    ],
)
def test_redirects(hub: FakeHub, cache: Path, location: str, text: str) -> None:
    hub.add("Org/Model", plain_files())
    headers = {"Location": location.format(commit="a" * 40)}
    hub.faults.append(answered("config.json", lambda *_: web.Response(status=302, headers=headers)))
    error = refusal(hub, cache)
    assert error.code == "refused" and text in str(error)


def test_a_redirect_to_an_address_without_encryption(tmp_path: Path) -> None:
    settings = read_settings({"HF_ENDPOINT": "https://hub.example/"})
    asked = client.HubClient(settings, "Org/Model", "main", pull_module.threading.Event())
    assert asked._next("https://a.example/x", "/y") == "https://a.example/y"
    with pytest.raises(DownloadError, match=r"redirects to b\.example without encryption"):
        asked._next("https://a.example/x", "http://b.example/y")


def test_a_connection_that_brings_almost_nothing(
    hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drip(sent: Sent, request: web.Request) -> web.StreamResponse | None:
        if not sent.path.endswith(".safetensors") or len(hub.fetched()) > 1:
            return None
        response = web.StreamResponse()
        response.content_length = len(sent.body)
        await response.prepare(request)
        for number in range(1000):
            await response.write(sent.body[number : number + 1])
            await asyncio.sleep(0.02)
        return response

    monkeypatch.setattr(transfer, "SLOW_S", 0.2)
    hub.add("Org/Model", plain_files())
    hub.faults.append(drip)
    path = pull(NAME, settings_of(hub, cache))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS and len(hub.fetched()) == 2


def test_a_silent_connection_ends(hub: FakeHub, cache: Path) -> None:
    async def silent(sent: Sent, request: web.Request) -> web.StreamResponse | None:
        await asyncio.sleep(60)
        return None

    hub.add("Org/Model", plain_files())
    hub.faults.append(silent)
    error = refusal(hub, cache, timeout_s=0.1)
    assert error.code == "network" and "timed out" in str(error).lower()


@pytest.mark.parametrize(
    "endpoint", ["huggingface.co", "ftp://x", "http://", "http://u:p@x", "http://x:0", "http://ü"]
)
def test_an_endpoint_that_is_no_address(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="HF_ENDPOINT must be the address of a hub"):
        read_settings({"HF_ENDPOINT": endpoint})


def test_a_token_that_is_none(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "geheim\x01ü")
    with pytest.raises(ConfigError, match="HF_TOKEN holds characters") as caught:
        read_settings()
    assert "geheim" not in str(caught.value)
