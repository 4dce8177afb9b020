"""Streams an answer over plain HTTP with aiohttp.

Usage: python -m examples.chat_http [URL] [QUESTION]
"""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp


async def run(url: str, question: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 64,
            "stream": True,
        }
        async with session.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:  # one event per line, with blank lines between
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    break
                if data:
                    delta = json.loads(data)["choices"][0]["delta"]
                    print(delta.get("content", ""), end="", flush=True)
    print()


def main(url: str = "http://127.0.0.1:8000", question: str = "What is your name?") -> None:
    asyncio.run(run(url, question))


if __name__ == "__main__":
    main(*sys.argv[1:])
