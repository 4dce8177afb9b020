"""What starts, wakes, puts to sleep and ends a model's process, and measures its memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import orjson

from serve.cluster.front.proxy import Proxy, UpstreamLostError
from serve.cluster.models.child import Child
from serve.cluster.models.memory import family_bytes, kv_bytes_of
from serve.cluster.models.model import Model
from serve.errors import MergestepError

logger = logging.getLogger(__name__)
_ASK_S = 10.0
_SLEEP_S = 3600.0  # packed weights may still be written to a slow disk
_WAKE_S = 3600.0  # weights may have to be packed again


class Switches:
    """Children over one proxy. key: what this process shows to them. say: is called with a model's
    name and each line of its log."""

    def __init__(self, proxy: Proxy, key: str, say: Callable[[str, str], object]) -> None:
        self._proxy = proxy
        self._headers = {"Authorization": f"Bearer {key}"}
        self._say = say

    async def start(self, model: Model, on_end: Callable[[], object]) -> None:
        """Returns when the model is ready. Raises MergestepError and OSError."""
        model.child = child = Child(model.spec, lambda line: self._say(model.name, line))
        await child.start(on_end)
        model.about = await self._about(child)
        await self._measure(model)

    async def end(self, model: Model) -> None:
        """Ends the model's process, if there is one."""
        child, model.child = model.child, None
        if child is not None:
            await child.stop()

    async def retire(self, model: Model) -> None:
        """Ends the model's process after its packed weights are kept for the next start. They are
        once it has slept."""
        if not model.has_slept:
            with suppress(MergestepError):
                await self.sleep(model)
        await self.end(model)

    async def sleep(self, model: Model) -> None:
        """Has the model give back its weights and K/V. Raises MergestepError."""
        await self._post(model, "/sleep?level=1", _SLEEP_S)
        model.has_slept = True
        assert model.child is not None
        model.asleep_bytes = await asyncio.to_thread(family_bytes, model.child.pid)

    async def wake(self, model: Model) -> None:
        await self._post(model, "/wake_up", _WAKE_S)
        await self._measure(model)

    async def metrics(self, model: Model) -> bytes | None:
        """Returns the model's own /metrics; None if it does not run."""
        child = model.child
        if child is None or not child.url:
            return None
        with suppress(UpstreamLostError):
            status, body = await self._proxy.call(
                "GET", f"{child.url}/metrics", self._headers, _ASK_S
            )
            return body if status == 200 else None
        return None

    async def _post(self, model: Model, path: str, timeout_s: float) -> None:
        child = model.child
        if child is None or child.status is not None:
            raise MergestepError("its process has ended")
        status, body = await self._proxy.call("POST", child.url + path, self._headers, timeout_s)
        if status != 200:
            raise MergestepError(f"{path} answered {status}: {_message(body)}")

    async def _about(self, child: Child) -> dict[str, object]:
        _, body = await self._proxy.call("GET", f"{child.url}/v1/models", self._headers, _ASK_S)
        try:
            about: dict[str, object] = orjson.loads(body)["data"][0]
        except (ValueError, LookupError, TypeError):
            return {}
        return about

    async def _measure(self, model: Model) -> None:
        """Measures what the model takes now, and adds what its K/V may still take."""
        text = (await self.metrics(model) or b"").decode("utf-8", "replace")
        assert model.child is not None
        now = await asyncio.to_thread(family_bytes, model.child.pid)
        most_kv, mapped_kv = kv_bytes_of(text)
        if now:
            model.awake_bytes = now + max(0, most_kv - mapped_kv)


def _message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode("utf-8", "replace")
