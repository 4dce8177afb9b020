"""Uses the official openai package (`pip install openai`) with a running server (`serve run`).

Usage: python -m examples.openai_client [URL]
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000") -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id

        chat = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is your name?"}],
            max_completion_tokens=32,
            temperature=0,
        )
        print(f"assistant: {chat.choices[0].message.content}")

        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Tell me a short story."}],
            max_completion_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            elif chunk.usage is not None:
                print(f"\n({chunk.usage.completion_tokens} tokens)")


if __name__ == "__main__":
    main(*sys.argv[1:])
