"""An engine whose answers are dictated by the conversation, for agents that loop over tools.

The embedded model calls no tool by its own choice. Here the user's text has the model's answers,
each as `SAY<<...>>`, in the order in which they are given: the first one when the user has spoken,
the second one after the results of the first one's calls, and so on; the last one is repeated.
Everything else is what every server has: templates, tokens, parsers, APIs. The device takes no
time, so prompts of any length are answered at once.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bench.common.instant import load_instant
from serve import Engine
from serve.engine.loader import LoadedEngine
from serve.scheduler.sequence import Sequence
from serve.text.tokenizer import Tokenizer

CONTEXT = 1 << 17
SAYING = re.compile(r"SAY<<(.*?)>>(?!>)", re.DOTALL)
TURN = "<|assistant|>"
NOTHING_DICTATED = "Nothing was dictated."


def dictated_engine(name: str, model: Path | None = None) -> Engine:
    """model: the directory of its tokenizer and chat template; the embedded one by default."""
    settings: dict[str, Any] = {"max_model_len": CONTEXT, "max_num_seqs": 16}
    if model is not None:
        settings["model"] = str(model)
    return Engine(load=load_dictated, served_model_name=name, **settings)


def dictated_answer(prompt: str) -> str:
    """Returns what the model says to a prompt that ends where its turn begins."""
    *_, last_user = [part for part in prompt.split("<|user|>") if "SAY<<" in part] or [""]
    sayings = SAYING.findall(last_user.partition("<|end|>")[0])
    if not sayings:
        return NOTHING_DICTATED
    turns = prompt[prompt.rindex(last_user) :].count(TURN)
    return str(sayings[min(turns, len(sayings)) - 1])


def load_dictated(config: Any, *, progress: bool = False) -> LoadedEngine:
    tokenizer = Tokenizer.load(config.model_path)
    answers: dict[tuple[int, int], list[int]] = {}

    def script(sequence: Sequence) -> int:
        key = id(sequence.request), sequence.index
        if not sequence.num_output_tokens or key not in answers:
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            text = dictated_answer(tokenizer.decode(prompt, skip_special_tokens=False))
            answers[key] = tokenizer.encode(text, add_special_tokens=False)
        tokens = [*answers[key], tokenizer.eos_token_id]
        return tokens[min(sequence.num_output_tokens, len(tokens) - 1)]

    return load_instant(config, progress=progress, script=script, num_pages=1024, token_bytes=16)
