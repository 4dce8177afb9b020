"""Authentication by API keys, the limits of a key, and hosts that a server answers."""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import uvloop

from serve.errors import ConfigError
from serve.http import HttpServer, HttpSettings
from serve.http.calls.key_policy import salt_of
from tests.support.http.api_keys import ALICE, BOB, KEYS, bearer, write_keys
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import BODY, CHAT, RAW_BODY, request
from tests.support.http.running_server import Served, run_with_server, send_raw

PUBLIC = {"/", "/health", "/ready", "/health/live", "/health/ready", "/ping"}
COMPLETIONS = "/v1/completions"


# ---- authentication

REFUSED: dict[str, list[str]] = {
    "none": [],
    "wrong": ["Authorization: Bearer wrong-0123456789abcdef"],
    "empty": ["Authorization: Bearer "],
    "only the scheme": ["Authorization: bearer"],
    "no scheme": [f"Authorization: {ALICE}"],
    "basic": [f"Authorization: Basic {ALICE}"],
    "8 kB": ["Authorization: Bearer " + "a" * 8000],
    "non-ASCII": ["Authorization: Bearer \xe4\xff\xfe" + ALICE],
    "a prefix of the key": [f"Authorization: Bearer {ALICE[:-1]}"],
    "a longer key": [f"Authorization: Bearer {ALICE}x"],
    "a name before the key": [f"Authorization: Bearer alice:{ALICE}"],
    "the digest": [f"Authorization: Bearer {hashlib.sha256(ALICE.encode()).hexdigest()}"],
    "wrong x-api-key": ["x-api-key: wrong"],
    "a valid key after an invalid one": ["Authorization: Bearer wrong", f"x-api-key: {ALICE}"],
    "api-key": [f"api-key: {ALICE}"],
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.row("A1")
def test_refused(name: str) -> None:
    async def check(served: Served) -> None:
        for path in (CHAT, "/nowhere"):
            first = f"POST {path} HTTP/1.1"
            answer = await served.raw(request(b"{}", *REFUSED[name], first=first))
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            error = answer.error()
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert not served.engine.submitted

    run_with_server(FakeEngine(), check, api_keys=KEYS)


@pytest.mark.parametrize(
    "line",
    [
        f"Authorization: Bearer {ALICE}",
        f"authorization: bearer {ALICE}",
        f"Authorization: Bearer   {ALICE} ",
        f"x-api-key: {ALICE}",
        f"X-API-KEY: {BOB}",
    ],
)
def test_accepted(line: str) -> None:
    async def check(served: Served) -> None:
        assert (await served.raw(request(RAW_BODY, line))).status == 200

    run_with_server(FakeEngine(), check, api_keys=KEYS)


@pytest.mark.row("A6")
def test_a_key_in_the_query_and_two_keys_are_refused() -> None:
    async def check(served: Served) -> None:
        for name in ("key", "api_key", "api-key", "access_token"):
            answer = await served.raw(request(first=f"POST {CHAT}?{name}={ALICE} HTTP/1.1"))
            assert answer.status == 401
        for name, scheme in (("Authorization", "Bearer "), ("x-api-key", "")):
            lines = [f"{name}: {scheme}{key}" for key in (ALICE, BOB)]
            assert (await served.raw(request(RAW_BODY, *lines))).status == 400

    run_with_server(FakeEngine(), check, api_keys=KEYS)


@pytest.mark.row("A3")
def test_every_route_but_public_ones_needs_a_key() -> None:
    """Only the routes in PUBLIC and the files of the page are answered without a key."""

    async def check(served: Served) -> None:
        routes = served.server.app.routes
        public = {route.path for route in routes if route.is_public}
        assert {path for path in public if not path.startswith("/page/")} <= PUBLIC
        assert len(routes) > 5
        for route in routes:
            path = re.sub("{.*}", "x", route.path)
            for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
                async with served.session.request(method, path, data=b"{}") as response:
                    if route.is_public:
                        assert response.status in (200, 405)
                    else:
                        assert response.status == 401, (method, path)

    run_with_server(FakeEngine(), check, api_keys=KEYS)


ODD_PATHS = (
    "//v1/models",
    "/v1/./models",
    "/v1/%2e%2e/models",
    "/V1/models",
    "/v1/models/",
    "/v1/models;a=b",
    "/v1/models%00",
    "/v1%2fmodels",
    "/health/../v1/models",
    "/health/",
    "/ready%2f..%2fv1%2fmodels",
    "/v1/models/../../../../etc/passwd",
    "/v1/models/..%2f..%2fetc%2fpasswd",
    "/debug",
    "/docs/",
    "/v1/load_lora_adapter",
)


@pytest.mark.parametrize("path", ODD_PATHS)
@pytest.mark.row("A4", "A5")
def test_odd_paths(path: str) -> None:
    async def check(served: Served) -> None:
        data = request(b"", first=f"GET {path} HTTP/1.1", kind=None, length=None)
        assert (await served.raw(data)).status == 401
        with_key = request(
            b"", *[f"x-api-key: {ALICE}"], first=f"GET {path} HTTP/1.1", kind=None, length=None
        )
        answer = await served.raw(with_key)
        assert answer.status == 404
        assert answer.error()["code"] in ("unknown_url", "model_not_found")

    run_with_server(FakeEngine(), check, api_keys=KEYS)


@pytest.mark.row("F18")
def test_a_bad_key_gets_no_100_continue() -> None:
    async def check(served: Served) -> None:
        for length in ("10", "100000000"):
            answer = await served.raw(request(b"", "Expect: 100-continue", length=length))
            assert answer.status == 401

    run_with_server(FakeEngine(), check, api_keys=KEYS)


def test_health_needs_no_key_and_calls_do_while_draining() -> None:
    async def check(served: Served) -> None:
        for path in ("/health", "/ready"):
            async with served.session.get(path) as response:
                assert response.status == 200
        await served.server.drain()
        assert (await served.post(CHAT, BODY))[0] == 401
        assert (await served.post(CHAT, BODY, headers=bearer(ALICE)))[0] == 503

    run_with_server(FakeEngine(), check, api_keys=KEYS)


# ---- limits of a key


@pytest.mark.row("A15")
def test_each_key_has_its_own_prefixes() -> None:
    """Keys never share a cache salt, whatever salt a client adds. Without keys, the salt is that of
    the client."""
    salts: dict[str | None, list[Any]] = {}

    async def ask(served: Served, key: str | None) -> None:
        served.engine.submitted.clear()
        headers = bearer(key) if key else {}
        body = {"model": "fake", "prompt": "hi"}
        for extra in ({}, {"cache_salt": "s"}, {"cache_salt": salt_of("alice", None)}):
            assert (await served.post(COMPLETIONS, body | extra, headers=headers))[0] == 200
        assert (await served.post(CHAT, BODY, headers=headers))[0] == 200
        salts[key] = [params.cache_salt for _, params in served.engine.submitted]
        assert len(salts[key]) == 4

    async def with_keys(served: Served) -> None:
        await ask(served, ALICE)
        await ask(served, BOB)

    async def without_keys(served: Served) -> None:
        await ask(served, None)

    run_with_server(FakeEngine(), with_keys, api_keys=KEYS)
    assert salts[ALICE][0] == salts[ALICE][3]  # chat and completions share prefixes
    assert not set(salts[ALICE]) & set(salts[BOB])
    assert len(set(salts[ALICE])) == 3
    assert None not in salts[ALICE]
    run_with_server(FakeEngine(), without_keys)
    assert salts[None] == [None, "s", salt_of("alice", None), None]


def test_share_prefixes_lets_all_keys_share() -> None:
    async def check(served: Served) -> None:
        for key in (ALICE, BOB):
            assert (await served.post(CHAT, BODY, headers=bearer(key)))[0] == 200
        assert [params.cache_salt for _, params in served.engine.submitted] == [None, None]

    run_with_server(FakeEngine(), check, api_keys=KEYS, share_prefixes=True)


def test_every_endpoint_applies_the_policy_of_the_key() -> None:
    """Each submission to the engine carries the policy of its call."""
    for path in Path("serve/http").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if ast.unparse(node.func.value).rpartition(".")[2].lstrip("_") == "engine":
                assert node.func.attr not in ("embed", "generate", "stream", "collect"), path
                if node.func.attr.startswith("submit"):
                    assert "policy" in [keyword.arg for keyword in node.keywords], path


def limited_key(tmp_path: Path, **limits: int) -> str:
    lines = "".join(f"{name} = {value}\n" for name, value in limits.items())
    return write_keys(tmp_path / "k.toml", f'[[keys]]\nname = "alice"\nkey = "{ALICE}"\n{lines}')


def test_a_limit_on_tokens_and_priority(tmp_path: Path) -> None:
    path = limited_key(tmp_path, max_tokens=5, min_priority=3)

    async def check(served: Served) -> None:
        async def ask(**extra: Any) -> tuple[int, dict[str, Any]]:
            return await served.post(CHAT, BODY | extra, headers=bearer(ALICE))

        assert (await ask())[0] == 200
        params = served.engine.submitted[-1][1]
        assert (params.max_tokens, params.default_max_tokens, params.priority) == (None, 5, 3)
        assert (await ask(max_tokens=5, priority=4))[0] == 200
        assert served.engine.submitted[-1][1].priority == 4
        for field, value in (("max_tokens", 6), ("min_tokens", 6), ("priority", 2)):
            status, answer = await ask(**{field: value})
            assert (status, answer["error"]["param"]) == (400, field)
            assert "limit of this API key" in answer["error"]["message"]

    run_with_server(FakeEngine(), check, api_key_file=path)


# ---- addresses and hosts


def test_a_public_host_needs_keys_or_allow_no_key() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "a.example"):
        with pytest.raises(ConfigError, match=r"--api-key-file .* --allow-no-key"):
            HttpSettings(host=host)
        HttpSettings(host=host, allow_no_key=True)
        HttpSettings(host=host, api_keys=KEYS)
        HttpSettings(host=host, api_key_file="keys")
    for host in ("127.0.0.1", "::1", "localhost", "127.0.0.9"):
        HttpSettings(host=host)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({}, "localhost", 200),
        ({}, "LocalHost.:8000", 200),
        ({}, "127.0.0.1:1", 200),
        ({}, "[::1]:80", 200),
        ({}, "evil.example", 400),
        ({}, "localhost.evil.example", 400),
        ({}, "127.0.0.1.evil.example", 400),
        ({}, "", 400),
        ({"allowed_hosts": ("a.example",)}, "A.example:443", 200),
        ({"allowed_hosts": ("a.example",)}, "localhost", 400),
        ({"allowed_hosts": ("*",)}, "evil.example", 200),
        ({"host": "0.0.0.0", "allow_no_key": True}, "evil.example", 200),
        ({"host": "0.0.0.0", "allow_no_key": True, "allowed_hosts": ("a",)}, "evil.example", 400),
    ],
)
@pytest.mark.row("A10")
def test_hosts(settings: dict[str, Any], host: str, status: int) -> None:
    async def main() -> None:
        server = HttpServer(FakeEngine(), HttpSettings(port=0, **settings))  # type: ignore[arg-type]
        async with server:
            port = int(server.url.rpartition(":")[2])
            for path in ("/health", "/v1/models"):
                data = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
                answer = await send_raw("127.0.0.1", port, data)
                assert answer.status == status
                if status == 400:
                    assert "evil" not in answer.error()["message"]

    uvloop.run(main())
