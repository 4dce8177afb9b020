"""The page's files, which are read once and served from memory by fixed names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import hdrs, web

from serve.http.edge.errors import common_headers

DIRECTORY = Path(__file__).parents[1] / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# No foreign or inline code, no frames, no forms: a model's output stays text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for"
    " 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers revalidate, and mostly get 304
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file: its type, its bytes, and their ETag."""

    content_type: str
    body: bytes
    etag: str

    @classmethod
    def read(cls, path: Path) -> PageFile:
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
        return cls(TYPES[path.suffix], body, etag)

    def answer(self, request: web.BaseRequest, request_id: str) -> web.Response:
        headers = {**common_headers(request_id), **HEADERS, "ETag": self.etag}
        asked = request.headers.get(hdrs.IF_NONE_MATCH, "")
        if self.etag in [tag.strip().removeprefix("W/") for tag in asked[:1024].split(",")]:
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=self.body, headers={**headers, hdrs.CONTENT_TYPE: self.content_type}
        )


def read_page() -> dict[str, PageFile]:
    """Returns the files by URL path."""
    files = {f"/page/{path.name}": path for path in DIRECTORY.iterdir() if path.suffix in TYPES}
    files["/"] = files.pop("/page/index.html")
    return {name: PageFile.read(path) for name, path in files.items()}
