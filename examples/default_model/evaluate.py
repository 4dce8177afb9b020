"""Judges greedy answers to held-out questions by rules, and measures the perplexity of a text."""

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
    """Returns every turn of `count` held-out dialogs, after the right answers to its earlier turns.

    It leaves out prompts of more than `max_tokens` tokens."""
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
    """Returns greedy answers of up to `limit` tokens, in batches of prompts of similar length."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers = [""] * len(prompts)
    for first in range(0, len(order), 64):
        batch = order[first : first + 64]
        outputs = greedy(model, [prompts[i] for i in batch], encoder.ids[END], limit)
        for i, tokens in zip(batch, outputs, strict=True):
            answers[i] = encoder.tokenizer.decode(tokens, skip_special_tokens=False)
    return answers


def is_right(turn: Turn, reply: str) -> bool:
    if turn.kind == "list":
        return turn.is_right(reply) or list_is_right(reply, turn.question)
    return turn.is_right(reply)


def evaluate(model: Llama, encoder: Encoder, num_dialogs: int) -> tuple[dict[str, Any], list[str]]:
    """Returns the share of right answers per kind, and up to forty wrong answers as text."""
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
    """Returns the perplexity per token of separate dialogs, without the first token of each."""
    loss, count = 0.0, 0
    device = next(model.parameters()).device
    for ids in _documents(text, encoder):
        tokens = torch.tensor([ids], device=device)
        logits = model.logits(model.hidden(tokens))[0, :-1].float()
        loss += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
        count += len(ids) - 1
    return {"tokens": count, "perplexity": round(math.exp(loss / max(1, count)), 4)}
