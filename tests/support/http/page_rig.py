"""A server with the page whose every answer is scripted, and what a person does with the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bench.common.instant import InstantRunner, load_instant
from serve import Engine
from serve.engine.loader import LoadedEngine
from serve.http import HttpServer, HttpSettings
from tests.support.http.browser import Tab, open_tab


class Scripted:
    """An engine whose every answer is `reply`, `repeat` times."""

    def __init__(
        self, reply: str, *, step_s: float = 0.0, repeat: int = 1, name: str = "m"
    ) -> None:
        self.reply, self.step_s, self.repeat = reply, step_s, repeat
        self.runner: InstantRunner | None = None
        self.engine = Engine(load=self._load, served_model_name=name, max_num_seqs=4)

    def _load(self, config: Any, *, progress: bool = False) -> LoadedEngine:
        loaded: LoadedEngine
        tokens: list[int] = []

        def script(sequence: Any) -> int:
            position = sequence.num_output_tokens
            return tokens[min(position, len(tokens) - 1)]

        def make(kv: Any) -> InstantRunner:
            self.runner = InstantRunner(kv, script)
            self.runner.reset(self.step_s)
            return self.runner

        loaded = load_instant(config, progress=progress, make_runner=make)
        text = loaded.tokenizer.encode(self.reply * self.repeat, add_special_tokens=False)
        tokens += [*text, loaded.tokenizer.eos_token_id]
        return loaded


@asynccontextmanager
async def open_page(
    address: str, scripted: Scripted, **settings: Any
) -> AsyncIterator[tuple[HttpServer, Tab]]:
    async with (
        HttpServer(scripted.engine, HttpSettings(port=0, **settings)) as server,
        open_tab(address) as tab,
        asyncio.timeout(60),
    ):
        await tab.size(1280, 800)
        await tab.goto(server.url + "/")
        yield server, tab


async def ask(tab: Tab, text: str) -> None:
    await tab.value("document.querySelector('#prompt').focus()")
    await tab.type(text)
    await tab.press("Enter")


async def answers(tab: Tab) -> list[str]:
    texts = await tab.value(
        "[...document.querySelectorAll('.turn.assistant .body')].map(e => e.innerText)"
    )
    assert isinstance(texts, list)
    return texts
