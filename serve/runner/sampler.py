"""Samples tokens: a pure function of the logits and each sequence's tokens.

The random number of a row depends only on its seed and position, so a request samples the same
tokens in any batch, after a preemption and on any machine with the same logits. The order is:
penalties and biases, mask, temperature, min-p, top-k, top-p. Log-probabilities come from the raw
logits.

The native kernels do the work; the torch functions below do the same where they are not built.
"""

from __future__ import annotations

import collections.abc as abc
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ops.cpu import sampling
from serve.request import TokenLogprobs
from serve.scheduler.prompt_outputs import logprobs_of
from serve.scheduler.sequence import Sequence

# The candidates that top-p takes before it sorts the whole vocabulary; they almost always suffice.
_TOP_P_CANDIDATES = 512
_MASK64 = (1 << 64) - 1
_UInt64s = npt.NDArray[np.uint64]


class Sampled(NamedTuple):
    """The token_ids[i] and logprobs[i] (None if not requested) of row i."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None


def sample(logits: Tensor, sequences: abc.Sequence[Sequence]) -> Sampled:
    """Samples a token for each sequence. logits: [R, vocab] fp32, one row for each sequence; they
    may be overwritten. Masks must be filled."""
    if not (sampling.is_available() and sampling.takes(logits)):
        return sample_with_torch(logits, sequences)
    inputs = [_inputs_of(s) for s in sequences]
    masks = [None if s.mask is None else s.next_mask for s in sequences]
    forbids_stop = [s.stop_ids and len(s.token_ids) < s.min_tokens_total for s in sequences]
    if all(each.is_plain for each in inputs) and not any(forbids_stop) and not any(masks):
        return Sampled(sampling.argmax(logits), None)
    packed = sampling.packed_rows(len(inputs))
    for i in reversed(range(len(inputs))):  # of the rows of one sequence the longest comes first
        token_ids, mask = sequences[i].token_ids, masks[i]
        if mask is None:
            inputs[i].pack(packed, i, token_ids, bool(forbids_stop[i]))
        else:  # the mask excludes the forbidden stop tokens itself
            inputs[i].pack(packed, i, token_ids, False, mask.address)
    sampled = sampling.sample(logits, packed)
    logprobs = _logprobs_of(inputs, sampled) if any(each.has_logprobs for each in inputs) else None
    return Sampled(sampled["token"].tolist(), logprobs)


def _inputs_of(sequence: Sequence) -> sampling.SamplingInputs:
    """Returns the sequence's inputs, which are made at its first step and kept with it."""
    inputs = sequence.history
    if inputs is None:
        inputs = sequence.history = sampling.SamplingInputs(**sampling_settings(sequence))
    assert isinstance(inputs, sampling.SamplingInputs)
    return inputs


def sampling_settings(sequence: Sequence) -> dict[str, Any]:
    """Returns the arguments of SamplingInputs (ops/cpu) and of DeviceSamplingInputs (ops/cuda)."""
    params = sequence.request.params
    return {
        "seed": sequence.seed,
        "temperature": 0.0 if params.is_greedy else params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "num_prompt": sequence.num_prompt_tokens,
        "biases": params.logit_bias,
        "forbidden": sequence.stop_ids,
        "num_logprobs": params.logprobs,
    }


def _logprobs_of(
    inputs: list[sampling.SamplingInputs], sampled: sampling.SampledRows
) -> list[TokenLogprobs | None]:
    logprobs = logprobs_of(sampled, sampling.MAX_TOP)
    return [
        item if each.has_logprobs else None for each, item in zip(inputs, logprobs, strict=True)
    ]


def sample_with_torch(logits: Tensor, sequences: abc.Sequence[Sequence]) -> Sampled:
    """Does what sample() does without the native kernels, on any device and element type."""
    num_logprobs = [s.request.params.logprobs for s in sequences]
    raw = None
    if any(count is not None for count in num_logprobs):
        raw = torch.log_softmax(logits, dim=-1)
    _adjust(logits, sequences)
    token_ids = torch.argmax(logits, dim=-1).tolist()
    random_rows = [i for i, s in enumerate(sequences) if not s.request.params.is_greedy]
    if random_rows:
        rows = logits if len(random_rows) == len(sequences) else logits[random_rows]
        drawn = _draw(rows, [sequences[i] for i in random_rows])
        for i, token in zip(random_rows, drawn, strict=True):
            token_ids[i] = token
    logprobs = None if raw is None else _logprobs(raw, token_ids, num_logprobs)
    return Sampled(token_ids, logprobs)


def uniform(seeds: abc.Sequence[int], positions: abc.Sequence[int]) -> Tensor:
    """Returns [R] fp64 in [0, 1), the splitmix64 of (seed, position) (Steele, Lea, Flood, OOPSLA
    2014)."""
    seed = np.array([s & _MASK64 for s in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seed) ^ (position * np.uint64(0x9E3779B97F4A7C15)))
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _splitmix(x: _UInt64s) -> _UInt64s:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x


def _adjust(logits: Tensor, sequences: abc.Sequence[Sequence]) -> None:
    """Applies penalties, biases, masks and forbidden stop tokens in place, to the rows that have
    them."""
    for i, sequence in enumerate(sequences):
        params = sequence.request.params
        if params.has_penalties:
            _penalize(logits[i], sequence)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias))
            logits[i, ids] += torch.tensor(list(params.logit_bias.values()))
        mask = sequence.next_mask
        if mask is not None:
            bits = np.unpackbits(mask.bits.view(np.uint8), bitorder="little")
            allowed = torch.from_numpy(bits[: logits.shape[1]].view(np.bool_)).to(logits.device)
            logits[i].masked_fill_(~allowed, float("-inf"))
        elif len(sequence.token_ids) < sequence.min_tokens_total and sequence.stop_ids:
            logits[i, list(sequence.stop_ids)] = float("-inf")


def _penalize(row: Tensor, sequence: Sequence) -> None:
    """Applies the penalties to row [vocab]: repetition over prompt and output, presence and
    frequency over output."""
    params = sequence.request.params
    history = _inputs_of(sequence).history
    assert history is not None
    tokens = history.tokens(sequence.token_ids)
    if params.repetition_penalty != 1.0:
        values = row[tokens]  # a token that occurs twice is written twice, with the same value
        factor = params.repetition_penalty
        row[tokens] = torch.where(values > 0, values / factor, values * factor)
    output = tokens[sequence.num_prompt_tokens :]
    if params.presence_penalty and len(output):
        seen = torch.zeros_like(row).index_fill_(0, output, float(params.presence_penalty))
        row -= seen
    if params.frequency_penalty and len(output):
        step = torch.full(output.shape, -params.frequency_penalty, dtype=row.dtype)
        row.index_add_(0, output, step)


def _draw(logits: Tensor, sequences: abc.Sequence[Sequence]) -> list[int]:
    """Samples one token for each row of logits [R, vocab] by inverting its cumulative
    distribution."""
    params = [s.request.params for s in sequences]
    temperature = torch.tensor([p.temperature for p in params])[:, None]
    scaled = logits / temperature
    if any(p.min_p > 0 for p in params):
        # p >= min_p * p_max in logarithms needs no softmax
        floor = torch.tensor([p.min_p for p in params])[:, None].log()
        limit = scaled.amax(-1, keepdim=True) + floor
        scaled = scaled.masked_fill(scaled < limit, float("-inf"))
    u = uniform([s.seed for s in sequences], [len(s.token_ids) for s in sequences])
    vocab_size = logits.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    cut = [i for i, p in enumerate(params) if top_k[i] < vocab_size or p.top_p < 1.0]
    chosen: list[int] = [0] * len(params)
    uncut = sorted(set(range(len(params))) - set(cut))
    if uncut:
        probs = torch.softmax(scaled[uncut].double(), dim=-1)
        for i, token in zip(uncut, _invert(probs, u[uncut]).tolist(), strict=True):
            chosen[i] = token
    if cut:
        limits = torch.tensor([top_k[i] for i in cut])
        top_p = torch.tensor([params[i].top_p for i in cut], dtype=torch.float64)
        for i, token in zip(cut, _draw_cut(scaled[cut], limits, top_p, u[cut]), strict=True):
            chosen[i] = token
    return chosen


def _draw_cut(scaled: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor) -> list[int]:
    """Samples rows with top-k or top-p from their candidates in descending order."""
    vocab_size = scaled.shape[-1]
    with_k = top_k < vocab_size
    count = _TOP_P_CANDIDATES
    if bool(with_k.any()):
        count = max(count, int(top_k[with_k].max()))
    count = min(count, vocab_size)
    values, ids = torch.topk(scaled, count, dim=-1)
    rank = torch.arange(count)[None]
    values = values.masked_fill(rank >= top_k[:, None], float("-inf"))
    # top-p applies to what remains after top-k, so those rows normalize over their candidates
    total = torch.where(
        with_k, torch.logsumexp(values.double(), -1), torch.logsumexp(scaled.double(), -1)
    )
    probs = torch.exp(values.double() - total[:, None])
    before = probs.cumsum(-1) - probs
    kept = probs.masked_fill(before >= top_p[:, None], 0.0)
    kept[:, 0] = probs[:, 0]  # the best token always stays, also with top_p = 0
    chosen = ids.gather(1, _invert(kept, u)[:, None])[:, 0].tolist()
    short = ~with_k & (probs.sum(-1) < top_p) & (count < vocab_size)
    for row in torch.nonzero(short)[
        :, 0
    ].tolist():  # the distribution is flat, so it is sorted whole
        chosen[row] = _draw_sorted(scaled[row], float(top_p[row]), u[row : row + 1])
    return list(chosen)


def _draw_sorted(scaled: Tensor, top_p: float, u: Tensor) -> int:
    values, ids = torch.sort(scaled, descending=True)
    probs = torch.softmax(values.double(), dim=-1)
    kept = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)
    return int(ids[int(_invert(kept[None], u)[0])])


def _invert(probs: Tensor, u: Tensor) -> Tensor:
    """Returns the first index whose cumulative probability exceeds u times the total. probs: [R,
    K]; u: [R]; result: [R]."""
    cumulative = probs.cumsum(-1)
    target = u[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).to(torch.int8).argmax(-1)
    return torch.minimum(index, last)  # rounding must not reach a token of probability 0


def _logprobs(
    raw: Tensor, token_ids: list[int], num_logprobs: list[int | None]
) -> list[TokenLogprobs | None]:
    """Returns each row's log-probabilities; raw: [R, vocab] log-probabilities."""
    chosen = raw.gather(1, torch.tensor(token_ids)[:, None])
    ranks = (raw > chosen).sum(-1).add_(1).tolist()
    values = chosen[:, 0].tolist()
    most = max(count or 0 for count in num_logprobs)
    top_values, top_ids = torch.topk(raw, most, dim=-1) if most else (None, None)
    result: list[TokenLogprobs | None] = []
    for i, count in enumerate(num_logprobs):
        if count is None:
            result.append(None)
            continue
        top: tuple[tuple[int, float], ...] = ()
        if count and top_values is not None and top_ids is not None:
            ids, logprobs = top_ids[i, :count].tolist(), top_values[i, :count].tolist()
            top = tuple(zip(ids, logprobs, strict=True))
        result.append(TokenLogprobs(token_ids[i], values[i], top, ranks[i]))
    return result
