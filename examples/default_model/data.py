"""Trains the tokenizer, encodes dialogs and packs them into rows of tokens by first fit.

(seed, step) alone determine the batch of a step, so a resumed run continues with the same text.
"""

import random
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from examples.default_model.corpus import Dialog, dialogs

BOS, SYSTEM, USER, ASSISTANT, END = SPECIAL = (
    "<|bos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
TOKENIZER_SEED = 1_000_000
SHORT_ANSWER, SHORT_WEIGHT = 24, 2.0  # one wrong token spoils a short answer but not a story
USER_SHARE, USER_WEIGHT = 0.25, 0.3  # the share of user tokens that are trained, and their weight


class Batch(NamedTuple):
    """Rows of whole dialogs; each tensor is [B, T], and `documents` numbers the dialogs."""

    tokens: Tensor
    documents: Tensor
    weights: Tensor


def train_tokenizer(vocab_size: int, num_dialogs: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True) for t in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    some = islice(dialogs(TOKENIZER_SEED), num_dialogs)
    tokenizer.train_from_iterator((m["content"] for d in some for m in d), trainer)
    return tokenizer


class Encoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids = {t: tokenizer.token_to_id(t) for t in SPECIAL}

    def prompt(self, dialog: Dialog) -> list[int]:
        """Returns the tokens of the dialog and the token that begins the model's answer."""
        tokens, _ = self.dialog(dialog)
        return [*tokens, self.ids[ASSISTANT]]

    def dialog(self, dialog: Dialog, *, is_start: bool = True) -> tuple[list[int], list[float]]:
        """Returns the tokens and their loss weights, which are zero outside the model's answers."""
        tokens, spoken = ([self.ids[BOS]], [0.0]) if is_start else ([], [])
        for message in dialog:
            body = self.tokenizer.encode(message["content"], add_special_tokens=False).ids
            weight = SHORT_WEIGHT if len(body) <= SHORT_ANSWER else 1.0
            weight *= message["role"] == "assistant"
            tokens += [self.ids[f"<|{message['role']}|>"], *body, self.ids[END]]
            spoken += [0.0] + [weight] * (len(body) + 1)
        return tokens, spoken


def make_batch(encoder: Encoder, seed: int, step: int, rows: int, length: int, chats: int) -> Batch:
    """Packs one batch. Each of the first `chats` rows is one document: dialogs joined to a chat."""
    rng = random.Random(f"pack-{seed}-{step}")
    stream = dialogs(f"train-{seed}-{step}")
    tokens = torch.full((rows, length), encoder.ids[END])
    documents = torch.full((rows, length), -1)
    weights = torch.zeros(rows, length)
    used = [0] * rows
    for number, row in enumerate(_placements(encoder, stream, used, length, chats)):
        at, ids, spoken = row
        start, stop = used[at], used[at] + len(ids)
        used[at] = stop
        tokens[at, start:stop] = torch.tensor(ids)
        documents[at, start:stop] = at if at < chats else rows + number
        user = [USER_WEIGHT if rng.random() < USER_SHARE else 0.0 for _ in ids]
        if start == 0 or at >= chats:
            user[0] = 0.0  # the start of a document is not predictable
        weights[at, start:stop] = torch.tensor(
            [weight or u for weight, u in zip(spoken, user, strict=True)]
        )
    return Batch(tokens, documents, weights)


def _placements(
    encoder: Encoder, stream: Iterator[Dialog], used: list[int], length: int, chats: int
) -> Iterator[tuple[int, list[int], list[float]]]:
    """Yields (row, tokens, weights) by first fit, until twenty consecutive dialogs do not fit."""
    misses = 0
    while misses < 20:
        dialog = next(stream)
        ids, spoken = encoder.dialog(dialog)
        row = next((r for r, u in enumerate(used) if u + len(ids) <= length), None)
        if row is None:
            misses += 1
            continue
        misses = 0
        if row < chats and used[row]:
            ids, spoken = encoder.dialog(
                [m for m in dialog if m["role"] != "system"], is_start=False
            )
        yield row, ids, spoken
