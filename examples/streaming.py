"""Streams several answers at once from an engine in this process.

Usage: python -m examples.streaming [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from serve import Engine, SamplingParams

QUESTIONS = ["What is your name?", "Tell me a short story."]


async def answer(engine: Engine, question: str) -> str:
    """Streams and returns one answer; abort() frees the request's memory even on an early exit."""
    params = SamplingParams(max_tokens=48, temperature=0.7, seed=1)
    stream = engine.submit_chat([{"role": "user", "content": question}], params)
    text = ""
    try:
        async for delta in stream:
            text += delta.text
            print(f"[{question[:8]}...] {delta.text!r}")
    finally:
        stream.abort()
    return text


async def run(model: str | None) -> None:
    async with Engine(model) as engine:
        texts = await asyncio.gather(*(answer(engine, question) for question in QUESTIONS))
        for question, text in zip(QUESTIONS, texts, strict=True):
            print(f"\n{question}\n{text}")


def main(model: str | None = None) -> None:
    asyncio.run(run(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
