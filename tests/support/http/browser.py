"""Headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


class Tab:
    """A page. problems: warnings and errors of its console, and exceptions; requests: every URL."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._session: str | None = None
        self._reader = asyncio.create_task(self._read())
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def send(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        return await asyncio.wait_for(answer, 20)

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            answer = self._answers.pop(data.get("id"), None)
            if answer is not None and not answer.done():
                if "error" in data:
                    answer.set_exception(RuntimeError(str(data["error"])))
                else:
                    answer.set_result(data["result"])
            self._note(data.get("method"), data.get("params", {}))

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def attach(self) -> None:
        """Connects to a new page in a profile of its own."""
        answer = await self.send("Target.createBrowserContext", disposeOnDetach=True)
        context = answer["browserContextId"]
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=context)
        answer = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")

    async def size(
        self, width: int, height: int, *, dark: bool = False, scale: float = 1, phone: bool = False
    ) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )
        scheme = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def goto(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression; waits for a promise."""
        answer = await self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 10.0) -> None:
        """Waits until the JavaScript expression is truthy."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await self.value(f"Boolean({expression})"):
            is_late = asyncio.get_running_loop().time() > deadline
            assert not is_late, f"never true: {expression}; {self.problems}"
            await asyncio.sleep(0.02)

    async def text(self, selector: str) -> str:
        text = await self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        assert isinstance(text, str)
        return text

    async def click(self, selector: str) -> None:
        """Clicks the middle of an element with the mouse."""
        box = await self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        event = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        event["modifiers"] = 8 if shift else 0
        text = {"text": "\r"} if key == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    async def picture(self) -> bytes:
        """Returns a PNG of the window."""
        picture = await self.send("Page.captureScreenshot", format="png")
        return base64.b64decode(picture["data"])

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()


@asynccontextmanager
async def browser() -> AsyncIterator[str]:
    """Runs Chromium and yields the address of its protocol."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={profile}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            yield await _address(Path(profile) / "DevToolsActivePort")
        finally:
            process.kill()
            await process.wait()


@asynccontextmanager
async def open_tab(address: str) -> AsyncIterator[Tab]:
    """Opens a tab of the browser at this address."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, max_msg_size=0) as socket,
    ):
        tab = Tab(socket)
        try:
            await tab.attach()
            yield tab
        finally:
            await tab.close()


async def _address(file: Path) -> str:
    """Returns the address that Chromium writes to the file when it listens."""
    for _ in range(1000):
        if len(lines := _lines(file)) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        await asyncio.sleep(0.02)
    raise AssertionError("Chromium does not start")


def _lines(file: Path) -> list[str]:
    return file.read_text().split("\n") if file.exists() else []
