"""Chats over several servers: prompt tokens found in prefix caches and times to first tokens, by
how `serve front` chooses the server.

    python -m bench.cluster.routing --chats 64 --turns 6
    python -m bench.cluster.routing --model random:llama-300m --words 60 --answer 8 --context 2048

Each chat sends its turns one after the other, a stream each; the answers become part of the next
prompt. After that one server is started again, and the chats go on for a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from bench.cluster.servers import Server, start_front, until_ready
from bench.common.checkpoints import model_directory
from serve.cluster.front.replicas import ROUTING
from serve.machine import free_port

MODEL = "m"
_WORDS = ("dog", "boat", "red", "hill", "near", "old", "house", "sea", "cat", "sees", "the", "a")


class Chat:
    """A conversation. first_s: seconds to the first token of each turn; num_prompt, num_cached:
    the tokens of all prompts, and those of them that a prefix cache had."""

    def __init__(self, number: int, num_words: int, num_answer: int) -> None:
        self._random = random.Random(number)
        self._num_answer = num_answer
        self._num_words = num_words  # of a turn
        self._messages: list[dict[str, str]] = []
        self._number = number
        self.first_s: list[float] = []
        self.num_prompt = self.num_cached = 0

    async def turn(self, session: aiohttp.ClientSession, url: str) -> None:
        words = " ".join(self._random.choices(_WORDS, k=self._num_words))
        self._messages.append({"role": "user", "content": f"{self._number}: {words}"})
        body = {
            "model": MODEL,
            "messages": self._messages,
            "max_tokens": self._num_answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        loop = asyncio.get_running_loop()
        began_s, first_s, text = loop.time(), 0.0, ""
        usage: dict[str, Any] = {}
        async with session.post(url + "/v1/chat/completions", json=body) as response:
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if not line.startswith(b"data: ") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if piece and not text:
                        first_s = loop.time() - began_s
                    text += piece
                usage = event.get("usage") or usage
        self._messages.append({"role": "assistant", "content": text})
        self.first_s.append(first_s)
        self.num_prompt += usage["prompt_tokens"]
        self.num_cached += usage["prompt_tokens_details"]["cached_tokens"]


async def measure(given: argparse.Namespace) -> None:
    model = model_directory(given.model)
    options = ("--dtype", "int8", "--compute-threads", "1", "--max-model-len", str(given.context))
    options += ("--served-model-name", MODEL, *([] if model is None else [model]))
    print("routing       servers  found in caches   first token p50, p99   after a restart: p50")
    rows = [("one cache", 1, "prefix"), *((name, given.servers, name) for name in ROUTING)]
    for name, count, routing in rows:
        async with AsyncExitStack() as stack:
            servers = [Server(free_port(), options) for _ in range(count)]
            for server in servers:
                await server.start()
                stack.callback(server.kill)
            for server in servers:
                await until_ready(server.url)
            front, url = await start_front([s.url for s in servers], "--routing", routing)
            stack.callback(front.kill)
            chats = [Chat(n, given.words, given.answer) for n in range(given.chats)]
            await _talk(chats, url, given.turns, given.at_once)
            found = sum(c.num_cached for c in chats) / sum(c.num_prompt for c in chats)
            times = sorted(t for chat in chats for t in chat.first_s)
            await servers[0].end(signal.SIGKILL)
            await servers[0].start()
            await until_ready(servers[0].url)
            await _talk(chats, url, 1, given.at_once)
            after = statistics.median(chat.first_s[-1] for chat in chats)
            middle, most = statistics.median(times), times[int(0.99 * len(times))]
            print(
                f"{name:13} {count:7}  {found:14.1%}   {1e3 * middle:7.1f}, {1e3 * most:7.1f} ms"
                f"   {1e3 * after:15.1f} ms",
                flush=True,
            )


async def _talk(chats: list[Chat], url: str, num_turns: int, at_once: int) -> None:
    room = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for turn in range(num_turns):  # all chats have a turn before any has the next one

            async def one(chat: Chat) -> None:
                async with room:
                    await chat.turn(session, url)

            order = random.Random(turn).sample(chats, len(chats))
            await asyncio.gather(*map(one, order))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--model", help="default: the built-in one")
    parser.add_argument("--words", type=int, default=50, help="of a turn")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--context", type=int, default=1024, help="tokens")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
