"""What `serve bench latency` measures, as tasks that every engine gets in the same form.

A task holds its prompts: all engines compute the same ones. No two prompts of a task are alike, so
that no engine can share work between them, and every round and every repetition has others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

MIXED = "mixed_16"
NUM_PREFILLS = 3
_NUM_MIXED, _MIXED_PROMPT, _MIXED_ANSWER = 16, (16, 512), (16, 128)
_ROWS = 256  # the default row budget of a step
_LEAD = 4  # additional steps
_WARM_CONTEXT, _WARM_STEPS = 16, 2

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Shape:
    """What is measured: `steps` decode steps at each batch from `context` tokens on, NUM_PREFILLS
    prefills of each length and, with has_mixed, the mixed requests."""

    batches: tuple[int, ...]
    context: int
    steps: int
    prefills: tuple[int, ...]
    has_mixed: bool

    @property
    def columns(self) -> list[str]:
        names = [f"prefill_{length}" for length in self.prefills]
        names += [f"decode_{batch}" for batch in self.batches]
        return names + [MIXED] * self.has_mixed

    @property
    def most_tokens(self) -> int:
        """The most tokens of a sequence in any measurement."""
        decoding = self.context + self.steps + lead(max(self.batches, default=1), self.context) + 2
        mixed = _MIXED_PROMPT[1] + _MIXED_ANSWER[1] if self.has_mixed else 0
        return max(decoding, mixed, *(length + 1 for length in self.prefills), 1)

    @property
    def most_sequences(self) -> int:
        """The most sequences at once in any measurement."""
        return max(*self.batches, _NUM_MIXED if self.has_mixed else 1, 1)


def lead(batch: int, context: int) -> int:
    """Returns an upper bound of the steps until the last of `batch` prompts has its first token."""
    return -(-batch * context // (_ROWS // 2)) + _LEAD


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement. kind: "prefill" (each prompt alone, to its first token), "decode" (all
    prompts at once; the steps in which all of them decode) or "mixed" (all at once, to the end).
    answers: the tokens of each answer; for "decode" the number of steps."""

    column: str
    kind: str
    prompts: list[Prompt]
    answers: list[int]
    is_warm_up: bool = False

    @property
    def num_tokens(self) -> int:
        """The tokens of the rate: prompt tokens of a prefill, else generated tokens."""
        return len(self.prompts[0]) if self.kind == "prefill" else sum(self.answers)


def warm_up_of(task: Task) -> Task:
    """Returns a shorter task that runs the same code on the same shapes."""
    prompts, answers = task.prompts, [_WARM_STEPS] * len(task.prompts)
    if task.kind == "prefill":
        prompts, answers = prompts[:1], task.answers[:1]
    elif task.kind == "decode":
        prompts = [prompt[:_WARM_CONTEXT] for prompt in prompts]
    return replace(task, prompts=prompts, answers=answers, is_warm_up=True)


def make_task(column: str, shape: Shape, vocab_size: int, seed: Sequence[object]) -> Task:
    """Returns the task of a column; the same seed gives the same task."""
    kind, _, number = column.partition("_")
    rng = random.Random(f"{column} {seed}")
    if kind == "mixed":
        rng_of_lengths = random.Random(_NUM_MIXED)  # the lengths are the same in every round
        lengths = [rng_of_lengths.randint(*_MIXED_PROMPT) for _ in range(_NUM_MIXED)]
        answers = [rng_of_lengths.randint(*_MIXED_ANSWER) for _ in range(_NUM_MIXED)]
    elif kind == "prefill":
        lengths, answers = [int(number)] * NUM_PREFILLS, [1] * NUM_PREFILLS
    else:
        lengths, answers = [shape.context] * int(number), [shape.steps] * int(number)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return Task(column, kind, prompts, answers)
