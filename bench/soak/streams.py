"""Sends the calls of a soak: streams that each make one call after another, some of which they
abort at a random moment, and raw connections that are no proper HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from bench.soak.calls import HOSTILE, Call, Calls

_RESPONSE_ID = re.compile(rb'"id": ?"(resp_\w+)"')
_CODE = re.compile(rb'"code": ?"(\w+)"')
# an answer that has begun ends with an error
_ERROR = re.compile(
    rb'^data: \{"error"|^event: (?:error|response\.failed)\r?$|"finish_reason": ?"error"', re.M
)
_REFUSALS_MIDWAY = ("memory_budget",)  # of a full server
_KEPT_BYTES = 1 << 12
_CALL_TIMEOUT_S = 120.0
_LEARN = 0.05  # weight of the newest call in the mean seconds of its kind
_FIRST_S = 0.3  # the mean before the first call of a kind
_SLOW_READER_S = 0.5
_RAW_SHARE = 0.02  # of the calls of a stream
_RAW = (
    b"GET / HTTP/1.1\r\nHost: a\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 500\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 50,
    b"",
)


@dataclass(slots=True)
class Outcomes:
    """Counts of calls. by_kind: calls by kind and result ("ok", "refused", "aborted", "failed").
    failures: texts of the first failed calls."""

    by_kind: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    num_calls: int = 0
    num_aborted: int = 0

    def add(self, kind: str, result: str) -> None:
        self.by_kind[kind, result] += 1
        self.num_calls += 1
        self.num_aborted += result == "aborted"

    def fail(self, kind: str, text: str) -> None:
        self.add(kind, "failed")
        if len(self.failures) < 20:
            self.failures.append(f"{kind}: {text}")

    @property
    def answered(self) -> float:
        """The share of the valid calls that were answered, of those that were not aborted."""
        results = Counter[str]()
        for (kind, result), count in self.by_kind.items():
            if not kind.startswith(HOSTILE) and result != "aborted":
                results[result] += count
        return results["ok"] / results.total() if results else 1.0

    def total(self, result: str | None = None) -> int:
        return sum(n for (_, one), n in self.by_kind.items() if result in (None, one))


class Streams:
    """A number of streams to one server. abort_share: of the calls, which are aborted at a moment
    drawn evenly from the mean time that such a call has taken so far. Calls that end before their
    moment make up for it by more attempts."""

    def __init__(self, url: str, calls: Calls, *, num: int, abort_share: float, seed: int) -> None:
        self._url = url
        self._calls = calls
        self._num = num
        self._abort_share = abort_share
        self._rng = random.Random(seed)
        self._mean_s: dict[str, float] = {}
        self.outcomes = Outcomes()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=5.0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            streams = [asyncio.create_task(self._stream(session)) for _ in range(self._num)]
            try:
                await asyncio.gather(*streams)
            finally:
                for stream in streams:
                    stream.cancel()
                await asyncio.gather(*streams, return_exceptions=True)

    async def _stream(self, session: aiohttp.ClientSession) -> None:
        while True:
            if self._rng.random() < _RAW_SHARE:
                await self._raw()
                continue
            call = self._calls.draw()
            if self._rng.random() < self._abort_chance():
                await self._abort(session, call)
            else:
                await self._complete(session, call)

    def _abort_chance(self) -> float:
        """Returns the chance to try to abort the next call: the share that is wanted, and what is
        lacking so far."""
        counts = self.outcomes
        lacking = self._abort_share * counts.num_calls - counts.num_aborted
        return self._abort_share + max(0.0, lacking / self._num)

    async def _abort(self, session: aiohttp.ClientSession, call: Call) -> None:
        """Leaves a call before its end, which closes its connection."""
        mean_s = self._mean_s.get(call.kind, _FIRST_S)
        try:
            async with asyncio.timeout(self._rng.uniform(0.0, mean_s)):
                await self._send(session, call)
        except TimeoutError:
            self.outcomes.add(call.kind, "aborted")

    async def _complete(self, session: aiohttp.ClientSession, call: Call) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await self._send(session, call)
        except TimeoutError:
            self.outcomes.fail(call.kind, f"no end within {_CALL_TIMEOUT_S:g} s")
        took_s = loop.time() - began_s
        mean_s = self._mean_s.get(call.kind, took_s)
        self._mean_s[call.kind] = mean_s + _LEARN * (took_s - mean_s)

    async def _send(self, session: aiohttp.ClientSession, call: Call) -> None:
        """Sends a call and reads its answer to the end."""
        headers = {"Content-Type": "application/json", **call.headers}
        try:
            async with session.request(
                call.method, self._url + call.path, data=call.body or None, headers=headers
            ) as answer:
                text = await self._read(answer)
                status = answer.status
        except aiohttp.ClientError as error:
            # the server closes a connection when it refuses a body before its end
            if call.is_hostile:
                self.outcomes.add(call.kind, "refused")
            else:
                self.outcomes.fail(call.kind, repr(error))
            return
        code = _CODE.search(text)
        name = code[1].decode() if code else ""
        if status == 200 and _ERROR.search(text):  # it would have been this before the first event
            status = 429 if name in _REFUSALS_MIDWAY else 500
        if not call.accepts(status, name):
            self.outcomes.fail(call.kind, f"{status} {text[:300]!r} ... {text[-300:]!r}")
        elif status == 200:
            self.outcomes.add(call.kind, "ok")
        else:
            self.outcomes.add(call.kind, "refused")
        if call.kind == "responses" and (found := _RESPONSE_ID.search(text)):
            self._calls.note_response(found[1].decode())

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        """Reads the answer, now and then with a pause, and returns its first and last part."""
        first = last = b""
        pauses = self._rng.random() < 0.02
        async for chunk in answer.content.iter_any():
            if len(first) < _KEPT_BYTES:
                first += chunk
            else:
                last = (last + chunk)[-_KEPT_BYTES:]
            if pauses:
                await asyncio.sleep(_SLOW_READER_S)
                pauses = self._rng.random() < 0.5
        return first + last

    async def _raw(self) -> None:
        """Sends bytes that are not a whole request, reads what comes back, and leaves."""
        host, _, port = self._url.removeprefix("http://").rpartition(":")
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0.0, 2.0)):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(self._rng.choice(_RAW))
                    await reader.read()
                finally:
                    writer.transport.abort()
        self.outcomes.add(f"{HOSTILE}raw bytes", "refused")
