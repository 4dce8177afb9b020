"""Token choice on the device: packs what rows ask for, launches the kernels, brings results back.

Steps may overlap: a row may be planned while its sequence's newest token is known to the device
alone. The device keeps the last token of every slot (input ids are taken from there) and, for
sequences with penalties, how often they have each token.

Buffers keep their addresses, and run() neither waits nor allocates beyond torch's own workspaces,
so it can be captured in a CUDA graph; upload() and fetch() stay outside of it.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ops import triton_draw, triton_logprobs, triton_sampling
from ops.triton_sampling import EDGES, IN_PROMPT, MAX_VOCABULARY, Config

# triton_sampling: the words of a record
_RECORD = struct.Struct("=Qqdfffffiiiii")
_FIELDS = np.dtype(
    {
        "names": ["position", "slot", "counts_row", "first_edit", "num_edits"],
        "formats": [np.int64, np.int32, np.int32, np.int32, np.int32],
        "offsets": [8, 48, 52, 56, 60],
        "itemsize": _RECORD.size,
    }
)
_NO_ROW = _RECORD.pack(0, 0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0, -1, -1, 0, 0)
MAX_TOP = 20
# Biases and forbidden tokens of a row, at most (serve/request.py limits either to half of it).
MAX_EDITS = 2048
_MASK64 = (1 << 64) - 1
_MAX_INT32 = (1 << 31) - 1
_INT32s = npt.NDArray[np.int32]
_Edits = tuple[_INT32s, npt.NDArray[np.float32]]


class Kind(IntEnum):
    """What a step launches: the largest logits alone, draws and adjustments, log-probabilities."""

    GREEDY = 0
    FULL = 1
    DESCRIBED = 2


class DeviceChoice:
    """How the tokens of one sequence are chosen, packed once. Arguments: as ops/sampling.Choice."""

    def __init__(
        self,
        *,
        seed: int,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
        num_prompt: int = 0,
        biases: Mapping[int, float] | None = None,
        forbidden: Collection[int] = (),
        num_logprobs: int | None = None,
    ) -> None:
        assert num_logprobs is None or 0 <= num_logprobs <= MAX_TOP, f"{num_logprobs=}"
        self.has_penalties = repetition != 1.0 or presence != 0.0 or frequency != 0.0
        self.num_logprobs = num_logprobs
        self.num_prompt = num_prompt
        biases = biases or {}
        self.has_edits = bool(biases)
        self.is_plain = not (temperature or self.has_penalties or biases)
        # where its tokens are counted, and how many there are if the next step follows the last
        self.counts_row, self.next_count = -1, -1
        self._edits = _edits(biases, ())
        self._held_edits = _edits(biases, forbidden)
        floor = math.log(np.float32(min_p)) if min_p > 0 else -math.inf
        top_k = min(max(top_k, 0), _MAX_INT32)
        numbers = (temperature, floor, repetition, presence, frequency, top_k)
        self.record = _RECORD.pack(seed & _MASK64, 0, top_p, *numbers, -1, -1, 0, 0)

    def edits(self, is_held: bool) -> _Edits:
        """(tokens, what is added to their logits), each token once."""
        return self._held_edits if is_held else self._edits


def _edits(biases: Mapping[int, float], forbidden: Collection[int]) -> _Edits:
    values = {**biases, **dict.fromkeys(forbidden, -math.inf)}
    return np.array(list(values), dtype=np.int32), np.array(list(values.values()), dtype=np.float32)


class Row(NamedTuple):
    """One row of a step. token_ids: of its sequence, prompt first; where the last one is negative,
    only the device knows it, as last_tokens[slot]. is_held: forbid the forbidden."""

    choice: DeviceChoice
    slot: int
    token_ids: Sequence[int]
    is_held: bool = False


class Plan(NamedTuple):
    """A step on the host. records: uint8; edits: [2, n], tokens and the bits of what is added;
    counts: new rows of the table, each with a slot whose last token is to be counted too, or -1."""

    kind: Kind
    rows: Sequence[Row]
    records: Tensor
    edits: Tensor | None
    counts: list[tuple[int, Tensor, int]]


class Fetched(NamedTuple):
    """On the host, once the device has got there. All but tokens: only of Kind.DESCRIBED."""

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
        self.records = self._zeros(max_rows * _RECORD.size, dtype=torch.uint8)
        self.tokens = self._zeros(max_rows)
        self._edit_tokens = self._zeros(max_rows * MAX_EDITS)
        self._edit_values = self._zeros(max_rows * MAX_EDITS, dtype=torch.float32)
        self.token_counts = self._zeros(1, 1)
        self.has_counts = False
        num_chunks = -(-vocab_size // self.config.chunk)
        self._maxima = self._zeros(max_rows, num_chunks, dtype=torch.float32)
        self._indices = self._zeros(max_rows, num_chunks)
        self._counts = self._zeros(max_rows, EDGES, num_chunks)
        self._masses = self._zeros(max_rows, EDGES, num_chunks, dtype=torch.int64)
        self._values = self._zeros(max_rows, self.config.capacity, dtype=torch.float32)
        self._ids = self._zeros(max_rows, self.config.capacity)
        self._logprobs = self._zeros(max_rows, dtype=torch.float32)
        self._ranks = self._zeros(max_rows)
        self._top: tuple[Tensor, Tensor] | None = None
        # of the rows of token_counts, least recently used first
        self._owners = OrderedDict[int, DeviceChoice | None]((i, None) for i in range(max_rows))

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def allocate_counts(self) -> None:
        """The table that penalties need: max_rows * vocabulary * 4 bytes. Graphs captured before
        do not know it: call this first, or capture again when has_counts has changed."""
        if not self.has_counts:
            self.token_counts = self._zeros(self.max_rows, self.vocab_size)
            self.has_counts = True

    # -- on the host

    def plan(self, rows: Sequence[Row]) -> Plan:
        """Packs a step. IndexError for a bias, forbidden token or history beyond the vocabulary."""
        assert len(rows) <= self.max_rows, f"{len(rows)} rows"
        packed = b"".join([row.choice.record for row in rows])
        records = self._host(self.max_rows * _RECORD.size, torch.uint8)
        array = records.numpy()
        array[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
        array[len(packed) :].reshape(-1, _RECORD.size)[:] = np.frombuffer(_NO_ROW, dtype=np.uint8)
        fields = array.view(_FIELDS)
        fields["position"][: len(rows)] = [len(row.token_ids) for row in rows]
        fields["slot"][: len(rows)] = [row.slot for row in rows]
        kind, edits, counts = Kind.GREEDY, None, []
        edited: list[tuple[int, _Edits]] = []
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
        return Plan(kind, rows, records, edits, counts)

    def _host(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory that the device copies from or to; torch does not reuse it before that is done."""
        return torch.empty(size, dtype=dtype, pin_memory=self.device.type == "cuda")

    def _pack_edits(self, fields: npt.NDArray[Any], edited: list[tuple[int, _Edits]]) -> Tensor:
        tokens = np.concatenate([tokens for _, (tokens, _) in edited])
        values = np.concatenate([values for _, (_, values) in edited])
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise IndexError(f"a token id is beyond the vocabulary of {self.vocab_size}")
        first = 0
        for i, (each, _) in edited:
            assert len(each) <= MAX_EDITS, f"{len(each)} biases and forbidden tokens"
            fields["first_edit"][i], fields["num_edits"][i] = first, len(each)
            first += len(each)
        edits = self._host(2 * first, torch.int32).view(2, first)
        edits[0] = torch.from_numpy(tokens)
        edits[1] = torch.from_numpy(values.view(np.int32))
        return edits

    def _counts_of(self, row: Row) -> list[tuple[int, Tensor, int]]:
        """A new row of the table, unless the device has counted all along."""
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
        known = np.array(row.token_ids, dtype=np.int64)
        misses_one = num_tokens > 0 and known[-1] < 0
        known = known[: num_tokens - misses_one]
        if len(known) and not 0 <= known.min() <= known.max() < self.vocab_size:
            raise IndexError(f"a token id is beyond the vocabulary of {self.vocab_size}")
        counts = self._host(self.vocab_size, torch.int32)
        array = counts.numpy()
        array[:] = np.bincount(known[choice.num_prompt :], minlength=self.vocab_size)
        array[known[: choice.num_prompt]] |= IN_PROMPT
        return [(choice.counts_row, counts, row.slot if misses_one else -1)]

    # -- on the device

    def upload(self, plan: Plan) -> None:
        """Before run(), on its stream; not part of a graph."""
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

    def run(self, logits: Tensor, kind: Kind) -> Tensor:
        """logits: [R, V] fp32, adjusted in place -> tokens [R] int32, also in last_tokens.

        Row i is what upload()'s row i asks for; rows beyond the plan's get any token and no slot.
        """
        rows = logits.shape[0]
        assert logits.shape[1] == self.vocab_size and logits.stride(1) == 1, f"{logits.shape}"
        assert logits.dtype == torch.float32 and rows <= self.max_rows, f"{logits.dtype} {rows}"
        raw = logits.clone() if kind is Kind.DESCRIBED else None
        if kind is Kind.GREEDY:
            self._best(logits)
        else:
            self._draw(logits)
        if raw is not None:
            self._describe(raw)
        return self.tokens[:rows]

    def _shared(self, logits: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
        """(grid over all chunks of all rows, arguments that most kernels take)."""
        grid, chunks = triton_sampling.grid_of(logits, self.config)
        triton_sampling.chunk_max(logits, self._maxima, self._indices, self.config)
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
        triton_sampling.best_kernel[(logits.shape[0],)](
            **{**shared, "num_warps": 1}, **self._outputs()
        )

    def _draw(self, logits: Tensor) -> None:
        config, plan = self.config, self.records.view(torch.int32)
        row = {"logits": logits, "stride": logits.stride(0), "size": logits.shape[1]}
        grid, _ = triton_sampling.grid_of(logits, config)
        triton_sampling.adjust_kernel[grid](
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
        triton_sampling.chunk_sums_kernel[grid](**shared, plan=plan)
        shared |= {"values": self._values, "ids": self._ids, "CAPACITY": config.capacity}
        triton_sampling.gather_kernel[grid](**shared, plan=plan)
        triton_draw.draw_kernel[(logits.shape[0],)](**shared, **self._outputs(), BLOCK=config.block)

    def _describe(self, raw: Tensor) -> None:
        count = min(MAX_TOP, self.vocab_size)
        values, ids = torch.topk(raw, count, dim=-1)
        grid, shared = self._shared(raw)
        shared |= {"logits": raw, "stride": raw.stride(0), "tokens": self.tokens}
        shared |= {"masses": self._masses, "larger": self._counts}
        triton_logprobs.chunk_rank_kernel[grid](
            **shared, size=raw.shape[1], CHUNK=self.config.chunk
        )
        triton_logprobs.describe_kernel[(raw.shape[0],)](
            **{**shared, "num_warps": 1},
            logprobs=self._logprobs,
            ranks=self._ranks,
            top_logprobs=values,
            num_top=count,
            TOP=32,
        )
        self._top = (ids, values)

    def input_ids(self, given: Tensor, slots: Tensor) -> Tensor:
        """given: [T] int32 or int64, -1 for last_tokens[slots[i]]; slots: [T] -> [T] int64."""
        ids = torch.empty(given.shape, dtype=torch.int64, device=self.device)
        size = given.numel()
        grid = (-(-size // 256),)
        if size:
            triton_sampling.input_ids_kernel[grid](
                given, slots, self.last_tokens, ids, size, BLOCK=256
            )
        return ids

    # -- results

    def fetch(self, kind: Kind, num_rows: int) -> Fetched:
        """Starts copies to the host; whoever reads them waits for the stream first."""
        found = [self.tokens[:num_rows]]
        if kind is Kind.DESCRIBED:
            assert self._top is not None, "run() comes first"
            found += [self._logprobs[:num_rows], self._ranks[:num_rows]]
            found += [each[:num_rows] for each in self._top]
        copies = []
        for each in found:
            copy = self._host(each.numel(), each.dtype).view(each.shape)
            copies.append(copy.copy_(each, non_blocking=True))
        return Fetched(*copies)


def described(fetched: Fetched, rows: Sequence[Row]) -> list[Described | None]:
    """What the rows asked to know of their tokens; None for those that did not ask."""
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
