"""Unknown parameters are refused, or listed in a header if the setting says so."""

from __future__ import annotations

import logging

import pytest

from serve.errors import ConfigError
from serve.http import HttpSettings
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import Served, run_with_server

BODY = {"model": "fake", "prompt": "hi"}
UNKNOWN = {"zap": 1, "bad\r\nx-evil: 1": 2, "k" * 9000: 3, "naïve": 4, "none": None}


@pytest.mark.parametrize("stream", [False, True])
def test_a_header_lists_unknown_names(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def check(served: Served) -> None:
        body = {**BODY, **UNKNOWN, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True, "inner": 1}
        for _ in range(2):
            async with served.session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                warning = response.headers["x-mergestep-warning"]
                assert "x-evil" not in response.headers
                await response.read()
        assert warning.startswith('unknown parameters: "zap", "bad\\r\\nx-evil: 1", "kkk')
        assert warning.isascii() and len(warning) < 1024
        assert "none" not in warning
        assert ('"stream_options.inner"' in warning) == stream
        async with served.session.post("/v1/completions", json=BODY) as response:
            assert "x-mergestep-warning" not in response.headers

    with caplog.at_level(logging.WARNING):
        run_with_server(FakeEngine(), check, unknown_fields="warn")
    texts = [record.getMessage() for record in caplog.records]
    warnings = [text for text in texts if "unknown parameter" in text]
    assert len(warnings) == len(set(warnings)) == 4 + stream
    assert all("\n" not in text and len(text) < 200 for text in warnings)


def test_headers_and_logs_of_unknown_names_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async def check(served: Served) -> None:
        for start in range(0, 2000, 100):
            body = {**BODY, **{f"{'x' * 99}{start + i}": i for i in range(100)}}
            async with served.session.post("/v1/completions", json=body) as response:
                assert response.status == 200
                assert len(response.headers["x-mergestep-warning"]) < 1024
        long = {**BODY, **{f"{i}{'x' * 100_000}": i for i in range(8)}}
        assert (await served.post("/v1/completions", long))[0] == 200
        # a name is remembered, to log it once, and it could be as long as a body
        assert sum(map(len, served.server.app.context.logged_names)) < 256 * 80

    with caplog.at_level(logging.WARNING):
        run_with_server(FakeEngine(), check, unknown_fields="warn")
    assert len(caplog.records) <= 256


def test_other_errors_are_refused_with_the_setting() -> None:
    async def check(served: Served) -> None:
        status, answer = await served.post("/v1/completions", {**BODY, "zap": 1, "n": 0})
        assert (status, answer["error"]["param"]) == (400, "n")

    run_with_server(FakeEngine(), check, unknown_fields="warn")


@pytest.mark.row("J18")
def test_unknown_names_are_refused_by_default() -> None:
    async def check(served: Served) -> None:
        for fields in ({"zap": 1}, {"stream": True, "stream_options": {"zap": 1}}):
            status, answer = await served.post("/v1/completions", {**BODY, **fields})
            assert (status, answer["error"]["code"]) == (400, "unknown_parameter")
            assert "zap" in answer["error"]["message"]

    run_with_server(FakeEngine(), check)


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match="unknown_fields"):
        HttpSettings(unknown_fields="ignore")
