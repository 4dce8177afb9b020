"""Generates from many prompts at once without a server.

Usage: python -m examples.offline [MODEL]
"""

from __future__ import annotations

import sys

from serve import LLM, SamplingParams

PROMPTS = ["Once there was a fox", "One day a little cat", "Once there was a brave knight"]


def main(model: str | None = None) -> None:
    params = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=1)
    with LLM(model) as llm:
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

        question = [{"role": "user", "content": "What is your name?"}]
        (answer,) = llm.chat(question, SamplingParams(max_tokens=32), use_tqdm=False)
        print(f"assistant: {answer.outputs[0].text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
