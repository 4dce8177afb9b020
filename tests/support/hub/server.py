"""A hub like huggingface.co, over HTTP, which can also misbehave.

It has two ports: large files are sent by the second one, as by a content network of another host.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

LARGE = (".safetensors", ".gguf", ".bin")
TOKEN = "hf_the_token_of_the_tests"

Fault = Callable[["Sent", web.Request], Awaitable[web.StreamResponse | None]]


@dataclass
class Sent:
    """A file's content and its digest, as the hub lists it."""

    path: str
    body: bytes

    @property
    def is_large(self) -> bool:
        return self.path.endswith(LARGE)

    @property
    def digest(self) -> str:
        if self.is_large:
            return hashlib.sha256(self.body).hexdigest()
        head = f"blob {len(self.body)}\0".encode()
        return hashlib.sha1(head + self.body).hexdigest()

    def entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"rfilename": self.path, "size": len(self.body)}
        if not self.is_large:
            return entry | {"blobId": self.digest}
        large = {"sha256": self.digest, "size": len(self.body), "pointerSize": 134}
        return entry | {"blobId": "0" * 40, "lfs": large}


@dataclass
class Repo:
    """commits: by branch, tag or commit. access: "public", "gated" or "private"."""

    files: dict[str, Sent]
    commits: dict[str, str]
    access: str = "public"


@dataclass
class Seen:
    """A request that has come."""

    method: str
    path: str
    port: int
    range: str | None
    authorization: str | None


@dataclass
class FakeHub:
    """The hub of a test, in a thread. faults: asked before each file is sent; the first answer that
    is not None is sent. answers: bodies or errors in place of listings, by repository."""

    repos: dict[str, Repo] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    answers: dict[str, Callable[[], web.Response]] = field(default_factory=dict)
    edit: Callable[[dict[str, Any]], object] = lambda answer: None
    seen: list[Seen] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    def __enter__(self) -> FakeHub:
        self._loop = asyncio.new_event_loop()
        is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(is_up,), daemon=True)
        self._thread.start()
        assert is_up.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def content_url(self) -> str:
        return f"http://localhost:{self.ports[1]}"

    def add(
        self, name: str, files: dict[str, bytes], *, commit: str = "a" * 40, access: str = "public"
    ) -> Repo:
        sent = {path: Sent(path, body) for path, body in files.items()}
        self.repos[name] = Repo(sent, {"main": commit, commit: commit}, access)
        return self.repos[name]

    def fetched(self, ending: str = "") -> list[Seen]:
        """Returns the requests for contents of large files with this ending."""
        digests = {
            sent.digest: sent.path for repo in self.repos.values() for sent in repo.files.values()
        }
        content = [seen for seen in self.seen if seen.path.startswith("/content/")]
        return [seen for seen in content if digests[seen.path.split("/")[2]].endswith(ending)]

    def _run(self, is_up: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/api/models/{org}/{name}/revision/{revision:.+}", self._listing)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{path:.+}", self._resolve)
        app.router.add_get("/content/{digest}/{path:.+}", self._content)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        for _ in range(2):
            site = web.TCPSite(runner, "127.0.0.1", 0)
            self._loop.run_until_complete(site.start())
            self.ports.append(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]
        is_up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def _note(self, request: web.Request) -> None:
        headers = request.headers
        port = request.transport.get_extra_info("sockname")[1] if request.transport else 0
        self.seen.append(
            Seen(
                request.method,
                request.path,
                port,
                headers.get("Range"),
                headers.get("Authorization"),
            )
        )

    def _refusal(self, request: web.Request, *, is_file: bool) -> web.Response | Repo:
        """Returns the repository, or the answer of huggingface.co where it may not be seen."""
        given = request.headers.get("Authorization")
        if given not in (None, f"Bearer {TOKEN}", "Bearer hf_of_another_account"):
            return refused(401, None, "Invalid credentials in Authorization header")
        repo = self.repos.get(f"{request.match_info['org']}/{request.match_info['name']}")
        may_see = given == f"Bearer {TOKEN}"
        if repo is None or (repo.access == "private" and not may_see):
            return refused(404 if given else 401, "RepoNotFound", "Repository not found")
        if repo.access == "gated" and not may_see and is_file:
            return refused(403 if given else 401, "GatedRepo", "Access to this model is restricted")
        if request.match_info["revision"] not in repo.commits:
            return refused(404, "RevisionNotFound", "Invalid rev id")
        return repo

    async def _listing(self, request: web.Request) -> web.StreamResponse:
        self._note(request)
        name = f"{request.match_info['org']}/{request.match_info['name']}"
        if name in self.answers:
            return self.answers[name]()
        repo = self._refusal(request, is_file=False)
        if isinstance(repo, web.Response):
            return repo
        answer = {
            "id": name,
            "sha": repo.commits[request.match_info["revision"]],
            "siblings": [sent.entry() for sent in repo.files.values()],
        }
        self.edit(answer)
        return web.json_response(answer)

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        self._note(request)
        repo = self._refusal(request, is_file=True)
        if isinstance(repo, web.Response):
            return repo
        sent = repo.files.get(request.match_info["path"])
        if sent is None:
            return refused(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": repo.commits[request.match_info["revision"]]}
        if not sent.is_large:
            fault = await self._fault(sent, request)
            return fault or partial_of(sent, request, headers)
        headers |= {
            "X-Linked-Size": str(len(sent.body)),
            "X-Linked-Etag": f'"{sent.digest}"',
            "Location": f"{self.content_url}/content/{sent.digest}/{sent.path}?Signature=secret",
        }
        return web.Response(status=302, headers=headers)

    async def _content(self, request: web.Request) -> web.StreamResponse:
        self._note(request)
        digest = request.match_info["digest"]
        all_files = (sent for repo in self.repos.values() for sent in repo.files.values())
        sent = next(sent for sent in all_files if sent.digest == digest)
        return await self._fault(sent, request) or partial_of(sent, request, {})

    async def _fault(self, sent: Sent, request: web.Request) -> web.StreamResponse | None:
        if request.method == "HEAD":
            return None
        for fault in self.faults:
            response = await fault(sent, request)
            if response is not None:
                return response
        return None


def refused(status: int, code: str | None, message: str, **headers: str) -> web.Response:
    """Returns an error in the hub's shape."""
    headers |= {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return web.json_response({"error": message}, status=status, headers=headers)


def partial_of(sent: Sent, request: web.Request, headers: dict[str, str]) -> web.Response:
    """Returns a file, or the part that a request asks for."""
    headers = headers | {"ETag": f'"{sent.digest}"', "Accept-Ranges": "bytes"}
    wanted = request.http_range
    if wanted.start is None and wanted.stop is None:
        return web.Response(body=sent.body, headers=headers)
    body = sent.body[wanted]
    if not body:
        return web.Response(status=416, headers={"Content-Range": f"bytes */{len(sent.body)}"})
    first = wanted.start or 0
    span = f"bytes {first}-{first + len(body) - 1}/{len(sent.body)}"
    return web.Response(status=206, body=body, headers=headers | {"Content-Range": span})


def cut_off(ending: str, after: int, times: int = 1) -> Fault:
    """Returns a fault that ends the connection after some bytes, the first times."""
    left = [times]

    async def fault(sent: Sent, request: web.Request) -> web.StreamResponse | None:
        if not sent.path.endswith(ending) or left[0] == 0:
            return None
        left[0] -= 1
        first = request.http_range.start or 0
        length = len(sent.body) - first
        response = web.StreamResponse(status=206 if first else 200)
        response.content_length = length
        if first:
            span = f"bytes {first}-{len(sent.body) - 1}/{len(sent.body)}"
            response.headers["Content-Range"] = span
        await response.prepare(request)
        await response.write(sent.body[first : first + after])
        assert request.transport is not None
        request.transport.close()
        return response

    return fault


def answered(
    ending: str, make: Callable[[Sent, web.Request], web.StreamResponse], times: int = 1 << 30
) -> Fault:
    """Returns a fault that answers in another way, the first times."""
    left = [times]

    async def fault(sent: Sent, request: web.Request) -> web.StreamResponse | None:
        if not sent.path.endswith(ending) or left[0] == 0:
            return None
        left[0] -= 1
        return make(sent, request)

    return fault
