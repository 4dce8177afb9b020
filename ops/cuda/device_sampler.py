"""Sampling on the device: packs the rows' parameters, launches the kernels and fetches results.

Steps may overlap: a row may be planned while only the device knows its sequence's newest token. The
device keeps the last token of every slot, for input ids, and token counts of sequences with
penalties.

Buffers have fixed addresses, and run() neither waits nor allocates beyond torch's workspaces, so
that a CUDA graph can capture it; upload() and fetch() stay outside.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ops.cuda.sampling_inputs import (
    FIELDS,
    MAX_EDITS,
    MAX_TOP,
    NO_ROW,
    RECORD_BYTES,
    DeviceSamplingInputs,
    Edits,
    Row,
)
from ops.triton_kernels.logits import apply_masks, chunk_rank_kernel, describe_kernel
from ops.triton_kernels.sample_token import sample_kernel
from ops.triton_kernels.sampling import (
    EDGES,
    IN_PROMPT,
    MAX_VOCABULARY,
    Config,
    adjust_kernel,
    best_kernel,
    chunk_max,
    chunk_sums_kernel,
    gather_kernel,
    grid_of,
    input_ids_kernel,
)


class Kind(IntEnum):
    """The kernels of a step: argmax; adjustments and sampling; these and log-probabilities."""

    GREEDY = 0
    FULL = 1
    DESCRIBED = 2


class SamplingPlan(NamedTuple):
    """A step on the host.

    records: uint8; edits: [2, n], tokens and the bits of the added values; counts: new rows of the
    table of counts, each with a slot whose last token has to be counted too, or -1.
    """

    kind: Kind
    rows: Sequence[Row]
    records: Tensor
    edits: Tensor | None
    counts: list[tuple[int, Tensor, int]]


class Fetched(NamedTuple):
    """Results on the host, complete when the copies are. Only Kind.DESCRIBED has all fields."""

    tokens: Tensor
    logprobs: Tensor | None = None
    ranks: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None


class Described(NamedTuple):
    """A token's log-probability and rank (from 1), and the most likely (token, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int


class DeviceSampler:
    """Buffers and launches for steps of up to max_rows rows over num_slots sequences."""

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        num_slots: int,
        device: torch.device | str,
        config: Config | None = None,
    ) -> None:
        assert vocab_size <= MAX_VOCABULARY, f"{vocab_size=}"
        self.vocab_size, self.max_rows = vocab_size, max_rows
        self.device = torch.device(device)
        self.config = config or Config()
        self.last_tokens = self._zeros(num_slots)
        self.records = self._zeros(max_rows * RECORD_BYTES, dtype=torch.uint8)
        self.tokens = self._zeros(max_rows)
        self._edit_tokens = self._zeros(max_rows * MAX_EDITS)
        self._edit_values = self._zeros(max_rows * MAX_EDITS, dtype=torch.float32)
        self.token_counts = self._zeros(1, 1)
        self.has_counts = False
        self._masks: tuple[Tensor, Tensor] | None = None  # of this step: rows, words
        num_chunks = -(-vocab_size // self.config.chunk)
        self._maxima = self._zeros(max_rows, num_chunks, dtype=torch.float32)
        self._indices = self._zeros(max_rows, num_chunks)
        self._counts = self._zeros(max_rows, EDGES, num_chunks)
        self._masses = self._zeros(max_rows, EDGES, num_chunks, dtype=torch.int64)
        self._values = self._zeros(max_rows, self.config.capacity, dtype=torch.float32)
        self._ids = self._zeros(max_rows, self.config.capacity)
        self._logprobs = self._zeros(max_rows, dtype=torch.float32)
        self._ranks = self._zeros(max_rows)
        num_top = min(MAX_TOP, vocab_size)
        self._top_logprobs = self._zeros(max_rows, num_top, dtype=torch.float32)
        self._top_tokens = self._zeros(max_rows, num_top, dtype=torch.int64)
        # owners of the rows of token_counts, least recently used first
        self._owners = OrderedDict[int, DeviceSamplingInputs | None](
            (i, None) for i in range(max_rows)
        )

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def allocate_counts(self) -> None:
        """Allocates the table of counts for penalties: max_rows * vocabulary * 4 bytes.

        Graphs that were captured before do not use it. Call this first, or capture again when
        has_counts has changed.
        """
        if not self.has_counts:
            self.token_counts = self._zeros(self.max_rows, self.vocab_size)
            self.has_counts = True

    # -- on the host

    def plan(self, rows: Sequence[Row]) -> SamplingPlan:
        """Packs a step. IndexError for a bias, forbidden token or history beyond the vocabulary."""
        assert len(rows) <= self.max_rows, f"{len(rows)} rows"
        packed = b"".join([row.choice.record for row in rows])
        records = self._host(self.max_rows * RECORD_BYTES, torch.uint8)
        array = records.numpy()
        array[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
        array[len(packed) :].reshape(-1, RECORD_BYTES)[:] = np.frombuffer(NO_ROW, dtype=np.uint8)
        fields = array.view(FIELDS)
        fields["position"][: len(rows)] = [len(row.token_ids) for row in rows]
        fields["slot"][: len(rows)] = [row.slot for row in rows]
        kind, edits, counts = Kind.GREEDY, None, []
        edited: list[tuple[int, Edits]] = []
        for i, row in enumerate(rows):
            choice = row.choice
            if choice.num_logprobs is not None:
                kind = Kind.DESCRIBED
            if choice.is_plain and not row.is_held:
                continue
            kind = max(kind, Kind.FULL)
            if choice.has_penalties:
                counts += self._counts_of(row)
                fields["counts_row"][i] = choice.counts_row
            if choice.has_edits or row.is_held:
                edited.append((i, choice.edits(row.is_held)))
        if edited:
            edits = self._pack_edits(fields, edited)
        return SamplingPlan(kind, rows, records, edits, counts)

    def _host(self, size: int, dtype: torch.dtype) -> Tensor:
        """Allocates memory for copies; torch does not reuse it before a copy is complete."""
        return torch.empty(size, dtype=dtype, pin_memory=self.device.type == "cuda")

    def _pack_edits(self, fields: npt.NDArray[Any], edited: list[tuple[int, Edits]]) -> Tensor:
        tokens = np.concatenate([tokens for _, (tokens, _) in edited])
        values = np.concatenate([values for _, (_, values) in edited])
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise IndexError(f"a token id is beyond the vocabulary of {self.vocab_size}")
        first = 0
        for i, (each, _) in edited:
            fields["first_edit"][i], fields["num_edits"][i] = first, len(each)
            first += len(each)
        assert first <= len(self._edit_tokens), f"{first} biases and forbidden tokens"
        edits = self._host(2 * first, torch.int32).view(2, first)
        edits[0] = torch.from_numpy(tokens)
        edits[1] = torch.from_numpy(values.view(np.int32))
        return edits

    def _counts_of(self, row: Row) -> list[tuple[int, Tensor, int]]:
        """Returns a new row of counts, unless the device has counted all tokens."""
        choice, num_tokens = row.choice, len(row.token_ids)
        is_new = choice.counts_row < 0 or self._owners[choice.counts_row] is not choice
        if is_new:
            choice.counts_row = next(iter(self._owners))
            self._owners[choice.counts_row] = choice
        self._owners.move_to_end(choice.counts_row)
        is_new = is_new or choice.next_count != num_tokens
        choice.next_count = num_tokens + 1
        if not is_new:
            return []
        tokens = np.array(row.token_ids, dtype=np.int64)
        misses_one = num_tokens > 0 and tokens[-1] < 0
        tokens = tokens[: num_tokens - misses_one]
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise IndexError(f"a token id is beyond the vocabulary of {self.vocab_size}")
        counts = self._host(self.vocab_size, torch.int32)
        array = counts.numpy()
        array[:] = 0
        np.add.at(array, tokens[choice.num_prompt :], 1)
        array[tokens[: choice.num_prompt]] |= IN_PROMPT
        return [(choice.counts_row, counts, row.slot if misses_one else -1)]

    # -- on the device

    def upload(self, plan: SamplingPlan) -> None:
        """Copies a plan to the device. Call it before run(), on its stream, outside of a graph."""
        if plan.counts:
            self.allocate_counts()
        for row, counts, slot in plan.counts:
            self.token_counts[row].copy_(counts, non_blocking=True)
            if slot >= 0:
                newest = self.last_tokens[slot : slot + 1].long()
                one = torch.ones_like(newest, dtype=torch.int32)
                self.token_counts[row].index_add_(0, newest, one)
        if plan.edits is not None:
            size = plan.edits.shape[1]
            self._edit_tokens[:size].copy_(plan.edits[0], non_blocking=True)
            self._edit_values[:size].view(torch.int32).copy_(plan.edits[1], non_blocking=True)
        self.records.copy_(plan.records, non_blocking=True)
        masks = {i: row.mask for i, row in enumerate(plan.rows) if row.mask is not None}
        self._masks = self._upload_masks(masks) if masks else None

    def _upload_masks(self, masks: dict[int, npt.NDArray[np.uint32]]) -> tuple[Tensor, Tensor]:
        num_words = (self.vocab_size + 31) // 32
        rows = self._host(len(masks), torch.int32)
        rows.numpy()[:] = list(masks)
        words = self._host(len(masks) * num_words, torch.int32).view(len(masks), num_words)
        words.numpy()[:] = np.stack(list(masks.values())).view(np.int32)
        copies = [each.to(self.device, non_blocking=True) for each in (rows, words)]
        return copies[0], copies[1]

    def run(self, logits: Tensor, kind: Kind) -> Tensor:
        """Samples from logits: [R, V] fp32, adjusted in place; returns tokens [R] int32.

        Row i uses row i of the uploaded plan, and its token is also stored in last_tokens. Rows
        beyond the plan get undefined tokens and no slot.
        """
        rows = logits.shape[0]
        assert logits.shape[1] == self.vocab_size and logits.stride(1) == 1, f"{logits.shape}"
        assert logits.dtype == torch.float32 and rows <= self.max_rows, f"{logits.dtype} {rows}"
        raw = logits.clone() if kind is Kind.DESCRIBED else None
        if self._masks is not None:  # adjustments do not change minus infinity
            apply_masks(logits, *self._masks, self.config)
        if kind is Kind.GREEDY:
            self._best(logits)
        else:
            self._sample(logits)
        if raw is not None:
            self._describe(raw)
        return self.tokens[:rows]

    def warm_up_masks(self, logits: Tensor) -> None:
        """Compiles the kernel for steps with masks. logits: [1, V]."""
        row, words = self._zeros(1), self._zeros(1, (self.vocab_size + 31) // 32)
        apply_masks(logits, row, words, self.config)

    def _shared(self, logits: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
        """Returns (grid over all chunks of all rows, arguments of most kernels)."""
        grid, chunks = grid_of(logits, self.config)
        chunk_max(logits, self._maxima, self._indices, self.config)
        found = {"maxima": self._maxima, "indices": self._indices, "num_chunks": grid[0]}
        return grid, {**found, "CHUNKS": chunks, "num_warps": self.config.warps}

    def _outputs(self) -> dict[str, Any]:
        return {
            "plan": self.records.view(torch.int32),
            "tokens": self.tokens,
            "last_tokens": self.last_tokens,
            "token_counts": self.token_counts,
            "counts_stride": self.token_counts.stride(0),
        }

    def _best(self, logits: Tensor) -> None:
        _, shared = self._shared(logits)
        best_kernel[(logits.shape[0],)](**{**shared, "num_warps": 1}, **self._outputs())

    def _sample(self, logits: Tensor) -> None:
        config, plan = self.config, self.records.view(torch.int32)
        row = {"logits": logits, "stride": logits.stride(0), "size": logits.shape[1]}
        grid, _ = grid_of(logits, config)
        adjust_kernel[grid](
            **row,
            plan=plan,
            token_counts=self.token_counts,
            counts_stride=self.token_counts.stride(0),
            edit_tokens=self._edit_tokens,
            edit_values=self._edit_values,
            CHUNK=config.chunk,
            EDIT_BLOCK=256,
            num_warps=config.warps,
            enable_fp_fusion=False,  # as the CPU rounds
        )
        _, shared = self._shared(logits)
        shared |= {**row, "counts": self._counts, "masses": self._masses, "EDGES": EDGES}
        shared |= {"CHUNK": config.chunk}
        chunk_sums_kernel[grid](**shared, plan=plan)
        shared |= {"values": self._values, "ids": self._ids, "CAPACITY": config.capacity}
        gather_kernel[grid](**shared, plan=plan)
        shared |= {"BLOCK": config.block, "num_warps": config.sample_warps}
        sample_kernel[(logits.shape[0],)](**shared, **self._outputs())

    def _describe(self, raw: Tensor) -> None:
        top = (self._top_logprobs[: raw.shape[0]], self._top_tokens[: raw.shape[0]])
        torch.topk(raw, top[0].shape[1], dim=-1, out=top)
        grid, shared = self._shared(raw)
        shared |= {"logits": raw, "stride": raw.stride(0), "tokens": self.tokens}
        shared |= {"masses": self._masses, "larger": self._counts}
        chunk_rank_kernel[grid](**shared, size=raw.shape[1], CHUNK=self.config.chunk)
        describe_kernel[(raw.shape[0],)](
            **{**shared, "num_warps": 1},
            logprobs=self._logprobs,
            ranks=self._ranks,
            top_logprobs=top[0],
            num_top=top[0].shape[1],
            TOP=32,
        )

    def input_ids(self, given: Tensor, slots: Tensor) -> Tensor:
        """Returns [T] int64: given: [T] int32 or int64, with last_tokens[slots[i]] for -1."""
        ids = torch.empty(given.shape, dtype=torch.int64, device=self.device)
        size = given.numel()
        grid = (-(-size // 256),)
        if size:
            input_ids_kernel[grid](given, slots, self.last_tokens, ids, size, BLOCK=256)
        return ids

    # -- results

    def fetch(self, kind: Kind, num_rows: int) -> Fetched:
        """Starts copies to the host; the caller waits for the stream before it reads them."""
        found = [self.tokens[:num_rows]]
        if kind is Kind.DESCRIBED:
            more = (self._logprobs, self._ranks, self._top_tokens, self._top_logprobs)
            found += [each[:num_rows] for each in more]
        copies = []
        for each in found:
            copy = self._host(each.numel(), each.dtype).view(each.shape)
            copies.append(copy.copy_(each, non_blocking=True))
        return Fetched(*copies)


def described(fetched: Fetched, rows: Sequence[Row]) -> list[Described | None]:
    """Returns log-probabilities of the rows' tokens; None for rows without num_logprobs."""
    assert fetched.top_tokens is not None and fetched.top_logprobs is not None
    assert fetched.logprobs is not None and fetched.ranks is not None
    tokens, ranks = fetched.tokens.tolist(), fetched.ranks.tolist()
    logprobs = fetched.logprobs.tolist()
    result: list[Described | None] = []
    for i, row in enumerate(rows):
        count = row.choice.num_logprobs
        if count is None:
            result.append(None)
            continue
        top: list[tuple[int, float]] = []
        if count:
            pairs = zip(
                fetched.top_tokens[i].tolist(), fetched.top_logprobs[i].tolist(), strict=True
            )
            likely = [pair for pair in pairs if pair[1] > -math.inf]
            top = sorted(likely, key=lambda pair: (-pair[1], pair[0]))[:count]
        result.append(Described(tokens[i], logprobs[i], tuple(top), ranks[i]))
    return result
