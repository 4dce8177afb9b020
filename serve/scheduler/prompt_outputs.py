"""Results from a prompt's own rows: log-probabilities of its tokens, or one embedding vector.

Rows are taken by position, in order and each once, so that failed steps, recomputed chunks and
several outputs of one prompt change nothing. No torch, no asyncio.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from serve.errors import GenerationError
from serve.pooling import LogprobRows, PoolingParams
from serve.request import Request, TokenDelta, TokenLogprobs

_ITERATED = 256  # log-probabilities that an iteration makes at once


class PromptPart(NamedTuple):
    """A step's results of the rows at positions first .. end. found: the argument of `take`."""

    outputs: PromptOutputs
    first: int
    end: int
    found: Any

    def take(self) -> None:
        if self.end > self.outputs.num_done:
            assert self.first <= self.outputs.num_done, f"{self.first} {self.outputs.num_done}"
            self.outputs.take(self.first, self.end, self.found)
            self.outputs.num_done = self.end


class PromptOutputs:
    """Collects results of the rows up to position `end`; those before num_done are taken.

    All outputs of a request share it. The compute loop fills it; once complete it is constant, and
    the output thread may read it.
    """

    def __init__(self, first: int, end: int) -> None:
        self.num_done, self.end = first, end

    @property
    def is_complete(self) -> bool:
        return self.num_done >= self.end

    def take(self, first: int, end: int, found: Any) -> None:
        """Takes the rows from num_done on, of those at positions first .. end."""
        raise NotImplementedError

    def add_to(self, delta: TokenDelta) -> TokenDelta:
        """Returns a sequence's first delta with the results added."""
        raise NotImplementedError


class PromptScores(PromptOutputs):
    """Log-probabilities: the row at position p scores token p + 1, with num_top alternatives."""

    def __init__(self, token_ids: Sequence[int], num_top: int) -> None:
        super().__init__(0, len(token_ids) - 1)
        self.token_ids, self.num_top = token_ids, num_top
        self._parts: list[LogprobRows] = []
        self._logprobs: PromptLogprobs | None = None

    def take(self, first: int, end: int, found: LogprobRows) -> None:
        self._parts.append(found[self.num_done - first :])

    def add_to(self, delta: TokenDelta) -> TokenDelta:
        if self._logprobs is None:
            self._logprobs = PromptLogprobs(self._parts, self.num_top)
            self._parts = []
        return delta._replace(prompt_logprobs=self._logprobs)


class Pooled(PromptOutputs):
    """The embedding vector, from the sum of all rows (mean) or one row (last)."""

    def __init__(self, num_tokens: int, params: PoolingParams) -> None:
        super().__init__(0 if params.kind == "mean" else num_tokens - 1, num_tokens)
        self.params = params
        self._sum: npt.NDArray[np.float64] | None = None
        self._num_rows = 0

    def take(self, first: int, end: int, found: npt.NDArray[np.float64]) -> None:
        assert first == self.num_done, f"{first} {self.num_done}"
        self._sum = found if self._sum is None else self._sum + found
        self._num_rows += end - first

    def add_to(self, delta: TokenDelta) -> TokenDelta:
        assert self._sum is not None
        vector = (self._sum / self._num_rows)[: self.params.dimensions]
        if self.params.normalize:
            vector = vector / np.linalg.norm(vector)
        if not np.isfinite(vector).all():
            raise GenerationError("the embedding is not finite")
        return delta._replace(embedding=vector.astype(np.float32))


class PromptLogprobs(Sequence["TokenLogprobs | None"]):
    """One entry for each token of a prompt, None for the first one. Entries are made when they are
    read: there may be a hundred thousand, each with twenty alternatives."""

    def __init__(self, parts: Sequence[LogprobRows], num_top: int) -> None:
        self._rows = np.concatenate(parts) if parts else None
        self._num_top = num_top

    def __len__(self) -> int:
        return 1 + (0 if self._rows is None else len(self._rows))

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs | None]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return self._made(index - 1, index)[0] if index else None

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        yield None
        for first in range(0, len(self) - 1, _ITERATED):
            yield from self._made(first, first + _ITERATED)

    def _made(self, first: int, end: int) -> list[TokenLogprobs]:
        assert self._rows is not None
        return logprobs_of(self._rows[first:end], self._num_top)


def logprobs_of(rows: LogprobRows, num_top: int) -> list[TokenLogprobs]:
    """Returns the log-probabilities of each row, with at most num_top alternatives."""
    names = ("token", "rank", "logprob", "num_top", "top_tokens", "top_logprobs")
    columns = zip(*(rows[name].tolist() for name in names), strict=True)
    return [
        TokenLogprobs(
            token,
            logprob,
            tuple(zip(ids[: min(found, num_top)], values[: min(found, num_top)], strict=True)),
            rank,
        )
        for token, rank, logprob, found, ids, values in columns
    ]


def make_prompt_outputs(request: Request) -> PromptOutputs | None:
    """Returns an empty collector of what the request asks of its prompt's rows, or None."""
    if request.pooling is not None:
        return Pooled(len(request.prompt_token_ids), request.pooling)
    num_top = request.params.prompt_logprobs
    return None if num_top is None else PromptScores(request.prompt_token_ids, num_top)
