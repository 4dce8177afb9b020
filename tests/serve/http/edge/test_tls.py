"""HTTPS with certificates that the tests make, and requests from pages of other origins."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import warnings
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
import uvloop

from serve.errors import ConfigError
from serve.http import HttpServer, HttpSettings
from serve.http.client import ApiCallError, ApiClient
from tests.support.http.api_keys import ALICE
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import BODY, CHAT, RAW_BODY, request
from tests.support.http.running_server import Served, run_with_server

Files = dict[str, str]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> Files:
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    return {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def with_tls(check: Any, engine: FakeEngine | None = None, **settings: Any) -> None:
    async def main() -> None:
        server = HttpServer(engine or FakeEngine(), HttpSettings(port=0, **settings))  # type: ignore[arg-type]
        async with server, asyncio.timeout(20):
            assert server.url.startswith("https://127.0.0.1:")
            await check(server.url, int(server.url.rpartition(":")[2]))

    uvloop.run(main())


def test_https(authority: trustme.CA, files: Files) -> None:
    async def check(url: str, port: int) -> None:
        async with aiohttp.ClientSession(url) as session:
            for stream in (False, True):
                body = {**BODY, "stream": stream}
                async with session.post(CHAT, json=body, ssl=trusting(authority)) as response:
                    assert response.status == 200
                    text = await response.text()
                    assert ("[DONE]" in text) == stream
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get("/health")

    with_tls(check, **files)


def test_the_client_reports_an_untrusted_certificate(files: Files) -> None:
    async def check(url: str, port: int) -> None:
        async with ApiClient(url) as client:
            with pytest.raises(ApiCallError, match="its certificate is not trusted"):
                await client.models()

    with_tls(check, **files)


def test_a_stalled_reader_is_aborted_over_tls(authority: trustme.CA, files: Files) -> None:
    engine = FakeEngine(repeat=200_000)

    async def check(url: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trusting(authority), limit=1024
        )
        writer.write(request(RAW_BODY.replace(b"{", b'{"stream": true, ', 1)))
        assert (await reader.readline()).split()[1] == b"200"
        async with asyncio.timeout(5):
            while not engine.aborted:
                await asyncio.sleep(0.05)
        assert len(engine.aborted) == 1 and not engine.running
        received = b""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            async with asyncio.timeout(5):
                while part := await reader.read(1 << 16):
                    received += part
        assert b"[DONE]" not in received, "the server closes the connection within the answer"
        writer.transport.abort()

    with_tls(check, engine, write_timeout_s=0.3, **files)


def test_old_protocols_and_plain_text_are_refused(authority: trustme.CA, files: Files) -> None:
    async def check(url: str, port: int) -> None:
        old = trusting(authority)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            old.minimum_version = ssl.TLSVersion.TLSv1
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=old)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request())
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            answer = await reader.read()
        assert b"HTTP/1.1 200" not in answer
        writer.close()
        connection = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
        assert connection[1].get_extra_info("ssl_object").version() in ("TLSv1.2", "TLSv1.3")
        connection[1].close()

    with_tls(check, **files)


def test_a_handshake_has_a_deadline(
    authority: trustme.CA, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.http.edge.limits.TLS_HANDSHAKE_S", 0.3)

    async def check(url: str, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(2):
            assert await reader.read() == b""
        writer.close()

    with_tls(check, **files)


def test_clients_with_certificates(authority: trustme.CA, files: Files, tmp_path: Path) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    async def status(url: str, context: ssl.SSLContext) -> int:
        async with (
            aiohttp.ClientSession(url) as session,
            session.get("/health", ssl=context) as response,
        ):
            return response.status

    async def check(url: str, port: int) -> None:
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            await status(url, trusting(authority))
        unknown_client = trusting(authority)
        trustme.CA().issue_cert("client").configure_cert(unknown_client)
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            await status(url, unknown_client)
        known_client = trusting(authority)
        authority.issue_cert("client").configure_cert(known_client)
        assert await status(url, known_client) == 200

    with_tls(check, tls_client_ca=str(tmp_path / "ca.pem"), **files)


def test_bad_files(files: Files, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    other = trustme.CA().issue_cert("x").private_key_pem
    other.write_to_path(tmp_path / "other.pem")
    for settings, message in (
        ({"tls_cert": files["tls_cert"]}, "are needed together"),
        ({"tls_client_ca": files["tls_cert"]}, "needs tls_cert"),
        ({**files, "tls_cert": "/nowhere.pem"}, "tls_cert /nowhere.pem is not a file"),
        ({**files, "tls_cert": str(broken)}, "cannot be used"),
        ({**files, "tls_key": str(tmp_path / "other.pem")}, "cannot be used"),
        ({**files, "tls_client_ca": str(broken)}, "has no certificate"),
    ):

        async def main(settings: Files = settings, message: str = message) -> None:
            server = HttpServer(FakeEngine(), HttpSettings(port=0, **settings))  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=message):
                await server.start()

        uvloop.run(main())


# ---- other origins

GOOD, BAD = "https://a.example", "https://evil.example"


async def preflight(served: Served, origin: str) -> tuple[int, dict[str, str]]:
    answer = await served.raw(
        request(
            b"",
            f"Origin: {origin}",
            "Access-Control-Request-Method: POST",
            "Access-Control-Request-Headers: authorization,content-type",
            first=f"OPTIONS {CHAT} HTTP/1.1",
            kind=None,
            length=None,
        )
    )
    return answer.status, answer.headers


@pytest.mark.row("A9")
def test_unlisted_origins_are_refused() -> None:
    async def check(served: Served) -> None:
        for origin in (GOOD, BAD, "null"):
            status, headers = await preflight(served, origin)
            assert status == 401
            assert not [name for name in headers if name.startswith("access-control")]

    run_with_server(FakeEngine(), check, api_keys=(ALICE,))


def test_listed_origins() -> None:
    async def check(served: Served) -> None:
        status, headers = await preflight(served, GOOD)
        assert status == 204
        assert headers["access-control-allow-origin"] == GOOD
        assert "authorization" in headers["access-control-allow-headers"].lower()
        assert "access-control-allow-credentials" not in headers
        for origin in (BAD, "null", "https://a.example.evil", "http://a.example", "*"):
            status, headers = await preflight(served, origin)
            assert status == 401
            assert "access-control-allow-origin" not in headers
        stream = RAW_BODY.replace(b"{", b'{"stream": true, ', 1)
        for lines, status in (([f"x-api-key: {ALICE}"], 200), ([], 401)):
            for body in (RAW_BODY, stream):
                data = request(body, f"Origin: {GOOD}", *lines)
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writer.write(data)
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                assert head.split()[1] == str(status)
                assert f"access-control-allow-origin: {GOOD}\r\n" in head
                assert "vary: origin\r\n" in head
                assert "x-request-id" in head.partition("access-control-expose-headers: ")[2]
                writer.close()
        answer = await served.raw(request(RAW_BODY, f"Origin: {BAD}", f"x-api-key: {ALICE}"))
        assert answer.status == 200  # the browser hides the answer from the page
        assert "access-control-allow-origin" not in answer.headers

    run_with_server(FakeEngine(), check, api_keys=(ALICE,), cors_origins=(GOOD,))


@pytest.mark.parametrize(
    "origin", ["*", "https://*", "https://*.a.example", "a.example", "https://a/b", "null", ""]
)
@pytest.mark.row("A9")
def test_origins_are_exact(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins"):
        HttpSettings(cors_origins=(origin,))
