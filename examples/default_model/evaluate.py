"""Greedy answers to held-out questions, judged by rule, counted per kind; perplexity of a text."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from examples.default_model.corpus.dialogs import heldout_turns
from examples.default_model.corpus.tasks import list_is_right
from examples.default_model.corpus.turn import Turn
from examples.default_model.data import END, Encoder
from examples.default_model.greedy import greedy
from examples.default_model.model import Llama


class Case(NamedTuple):
    turn: Turn
    prompt: list[int]


def cases(encoder: Encoder, count: int, max_tokens: int) -> list[Case]:
    """Every turn of `count` held-out dialogs, with the right answers of the turns before it."""
    out: list[Case] = []
    for turns in heldout_turns(0, count):
        dialog: list[dict[str, str]] = []
        for turn in turns:
            dialog.append({"role": "user", "content": turn.question})
            prompt = encoder.prompt(dialog)
            if len(prompt) <= max_tokens:
                out.append(Case(turn, prompt))
            dialog.append({"role": "assistant", "content": turn.answer})
    return out


@torch.inference_mode()
def answer_all(model: Llama, encoder: Encoder, prompts: list[list[int]], limit: int) -> list[str]:
    """Greedy, sixty-four prompts of similar length at a time."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers = [""] * len(prompts)
    for first in range(0, len(order), 64):
        some = order[first : first + 64]
        said = greedy(model, [prompts[i] for i in some], encoder.ids[END], limit)
        for i, tokens in zip(some, said, strict=True):
            answers[i] = encoder.tokenizer.decode(tokens, skip_special_tokens=False)
    return answers


def is_right(turn: Turn, reply: str) -> bool:
    if turn.kind == "list":
        return turn.is_right(reply) or list_is_right(reply, turn.question)
    return turn.is_right(reply)


def evaluate(model: Llama, encoder: Encoder, num_dialogs: int) -> tuple[dict[str, Any], list[str]]:
    """The share of right answers per kind, and up to forty wrong ones as text."""
    asked = cases(encoder, num_dialogs, max_tokens=600)
    replies = answer_all(model, encoder, [c.prompt for c in asked], limit=220)
    total: Counter[str] = Counter()
    right: Counter[str] = Counter()
    wrong: list[str] = []
    for case, reply in zip(asked, replies, strict=True):
        total[case.turn.kind] += 1
        if is_right(case.turn, reply):
            right[case.turn.kind] += 1
        else:
            wrong.append(
                f"[{case.turn.kind}] {case.turn.question!r} -> {reply!r}, not {case.turn.answer!r}"
            )
    kinds = {
        k: {"asked": total[k], "right": right[k], "share": round(right[k] / total[k], 4)}
        for k in sorted(total)
    }
    overall = {"asked": total.total(), "right": right.total()}
    overall["share"] = round(right.total() / max(1, total.total()), 4)
    return {"all": overall, "kinds": kinds}, wrong[:40]


def table(result: dict[str, Any]) -> str:
    lines = [f"{'kind':<16}{'asked':>7}{'right':>7}{'share':>9}"]
    for kind, row in [*result["kinds"].items(), ("all", result["all"])]:
        lines.append(f"{kind:<16}{row['asked']:>7}{row['right']:>7}{row['share']:>9.1%}")
    return "\n".join(lines)


def _documents(text: str, encoder: Encoder) -> Iterator[list[int]]:
    for line in text.split("<|bos|>")[1:]:
        yield encoder.tokenizer.encode("<|bos|>" + line.rstrip("\n"), add_special_tokens=False).ids


@torch.inference_mode()
def perplexity(model: Llama, encoder: Encoder, text: str) -> dict[str, float]:
    """Per token over all tokens but the first of each dialog, each dialog read by itself."""
    loss, count = 0.0, 0
    device = next(model.parameters()).device
    for ids in _documents(text, encoder):
        tokens = torch.tensor([ids], device=device)
        logits = model.logits(model.hidden(tokens))[0, :-1].float()
        loss += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
        count += len(ids) - 1
    return {"tokens": count, "perplexity": round(math.exp(loss / max(1, count)), 4)}
