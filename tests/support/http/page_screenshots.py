"""Makes the pictures of docs/page.md with the embedded model under a light load.

python -m tests.support.http.page_screenshots [--out docs/images]
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

import aiohttp
import uvloop

from serve import Engine
from serve.http import HttpServer, HttpSettings
from tests.support.http.browser import Tab, browser, open_tab

ANIMALS = ("fox", "bear", "cat", "dog", "owl", "bee", "duck", "frog", "wolf", "horse")
IDLE = "!document.querySelector('.turn[aria-busy]')"


async def other_users(url: str, number: int) -> None:
    """Requests one story after the other, with pauses."""
    rng = random.Random(number)
    async with aiohttp.ClientSession(url) as session:
        messages: list[dict[str, str]] = []
        while True:
            await asyncio.sleep(rng.expovariate(8.0))
            question = f"Tell me a long story about a {rng.choice(ANIMALS)}"
            messages = [*messages, {"role": "user", "content": question}]
            length = rng.randrange(100, 400)
            body = {"model": "mergestep-default", "messages": messages, "max_tokens": length}
            body |= {"ignore_eos": True}  # only the length of the text matters
            async with session.post("/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                text = (await response.json())["choices"][0]["message"]["content"]
            messages = [{"role": "assistant", "content": text}]


async def ask(tab: Tab, text: str, *, waits: bool = True) -> None:
    await tab.value("document.querySelector('#prompt').focus()")
    await tab.type(text)
    await tab.press("Enter")
    await tab.until("document.querySelector('.turn.assistant')")
    if waits:
        await tab.until(IDLE, timeout_s=30)


async def desktop_chat(tab: Tab, url: str) -> bytes:
    await tab.size(1280, 800)
    await tab.goto(url)
    await tab.until("document.querySelector('#live-state.on')")
    await ask(tab, "Write a short poem about rain")
    await ask(tab, "What is 7 times 8?")
    await ask(tab, "Tell me a story about a fox")
    await asyncio.sleep(1.0)
    return await tab.picture()


async def desktop_live(tab: Tab, url: str) -> bytes:
    await tab.size(1280, 800, dark=True)
    await tab.goto(url)
    await tab.until("document.querySelector('#live-state.on')")
    async with asyncio.TaskGroup() as group:
        users = [group.create_task(other_users(url, number)) for number in range(12)]
        await asyncio.sleep(3.0)
        await ask(tab, "Tell me a long story about a horse")
        await ask(tab, "Tell me a long story about an owl", waits=False)
        await tab.until("document.querySelector('.turn:last-child .body').innerText.length > 200")
        picture = await tab.picture()
        for user in users:
            user.cancel()
    return picture


async def phone(tab: Tab, url: str) -> bytes:
    await tab.size(375, 740, phone=True, scale=2)
    await tab.goto(url)
    await ask(tab, "Tell me a joke")
    await ask(tab, "Tell me a story about a fox")
    await asyncio.sleep(0.5)
    return await tab.picture()


async def take_all(out: Path) -> None:
    async with (
        HttpServer(Engine(max_num_seqs=16), HttpSettings(port=0)) as server,
        browser() as address,
    ):
        url = server.url + "/"
        for name, shot in (("chat", desktop_chat), ("live", desktop_live), ("phone", phone)):
            async with open_tab(address) as tab:
                data = await shot(tab, url)
                path = out / f"page-{name}.png"
                await asyncio.to_thread(path.write_bytes, data)
                print(f"{path}: {len(data) >> 10} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    uvloop.run(take_all(parser.parse_args().out))


if __name__ == "__main__":
    main()
