"""Logits -> token ids: a pure function of the logits and each sequence's own history.

The random number of a row depends only on its seed and position, so a request draws the same
tokens in any batch, after a preemption and on any machine with the same logits. Order: penalties
and biases, mask, temperature, min-p, top-k, top-p. Log-probabilities come from the raw logits.

The native kernels do the work; the torch functions below do the same where they were not built.
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

# Candidates taken for top-p before sorting the whole vocabulary: almost always enough.
_TOP_P_CANDIDATES = 512
_MASK64 = (1 << 64) - 1
_UInt64s = npt.NDArray[np.uint64]


class Sampled(NamedTuple):
    """token_ids[i] and logprobs[i] (None where not asked for) of the i-th row."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None


def sample(logits: Tensor, sequences: abc.Sequence[Sequence]) -> Sampled:
    """logits: [R, vocab] fp32, one row for each sequence; may be overwritten. Masks are filled."""
    if not (sampling.is_available() and sampling.takes(logits)):
        return sample_with_torch(logits, sequences)
    choices = [_choice(s) for s in sequences]
    masks = [s.mask for s in sequences]
    held = [s.stop_ids and len(s.token_ids) < s.min_tokens_total for s in sequences]
    if all(c.is_plain for c in choices) and not any(held) and not any(masks):
        return Sampled(sampling.argmax(logits), None)
    packed = sampling.packed_rows(len(choices))
    for i, (choice, sequence, mask) in enumerate(zip(choices, sequences, masks, strict=True)):
        if mask is None:
            choice.pack(packed, i, sequence.token_ids, bool(held[i]))
        else:  # it knows what is held
            choice.pack(packed, i, sequence.token_ids, False, mask.address)
    sampled = sampling.sample(logits, packed)
    logprobs = _described(choices, sampled) if any(c.has_logprobs for c in choices) else None
    return Sampled(sampled["token"].tolist(), logprobs)


def _choice(sequence: Sequence) -> sampling.SamplingInputs:
    """Made at a sequence's first step, then kept with it."""
    choice = sequence.history
    if choice is None:
        choice = sequence.history = sampling.SamplingInputs(**choice_settings(sequence))
    assert isinstance(choice, sampling.SamplingInputs)
    return choice


def choice_settings(sequence: Sequence) -> dict[str, Any]:
    """The arguments of SamplingInputs (ops/cpu) and of DeviceSamplingInputs (ops/cuda)."""
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


def _described(
    choices: list[sampling.SamplingInputs], sampled: sampling.SampledRows
) -> list[TokenLogprobs | None]:
    found = logprobs_of(sampled, sampling.MAX_TOP)
    return [
        item if choice.has_logprobs else None for choice, item in zip(choices, found, strict=True)
    ]


def sample_with_torch(logits: Tensor, sequences: abc.Sequence[Sequence]) -> Sampled:
    """sample() without the native kernels: for any device and element type."""
    wanted = [s.request.params.logprobs for s in sequences]
    raw = None
    if any(count is not None for count in wanted):
        raw = torch.log_softmax(logits, dim=-1)
    _adjust(logits, sequences)
    token_ids = torch.argmax(logits, dim=-1).tolist()
    random_rows = [i for i, s in enumerate(sequences) if not s.request.params.is_greedy]
    if random_rows:
        rows = logits if len(random_rows) == len(sequences) else logits[random_rows]
        chosen = _draw(rows, [sequences[i] for i in random_rows])
        for i, token in zip(random_rows, chosen, strict=True):
            token_ids[i] = token
    logprobs = None if raw is None else _logprobs(raw, token_ids, wanted)
    return Sampled(token_ids, logprobs)


def uniform(seeds: abc.Sequence[int], positions: abc.Sequence[int]) -> Tensor:
    """[R] fp64 in [0, 1): splitmix64 of (seed, position) (Steele, Lea, Flood, OOPSLA 2014)."""
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
    """Penalties, biases, masks and forbidden ends, in place, on the rows that ask for them."""
    for i, sequence in enumerate(sequences):
        params = sequence.request.params
        if params.has_penalties:
            _penalize(logits[i], sequence)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias))
            logits[i, ids] += torch.tensor(list(params.logit_bias.values()))
        if sequence.mask is not None:
            bits = np.unpackbits(sequence.mask.bits.view(np.uint8), bitorder="little")
            allowed = torch.from_numpy(bits[: logits.shape[1]].view(np.bool_)).to(logits.device)
            logits[i].masked_fill_(~allowed, float("-inf"))
        elif len(sequence.token_ids) < sequence.min_tokens_total and sequence.stop_ids:
            logits[i, list(sequence.stop_ids)] = float("-inf")


def _penalize(row: Tensor, sequence: Sequence) -> None:
    """row: [vocab]. Repetition over prompt and output, presence and frequency over output."""
    params = sequence.request.params
    history = _choice(sequence).history
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
    """One token for each row by inverting its cumulative distribution. logits: [R, vocab]."""
    params = [s.request.params for s in sequences]
    temperature = torch.tensor([p.temperature for p in params])[:, None]
    scaled = logits / temperature
    if any(p.min_p > 0 for p in params):
        # p >= min_p * p_max, in logs: no softmax needed
        floor = torch.tensor([p.min_p for p in params])[:, None].log()
        limit = scaled.amax(-1, keepdim=True) + floor
        scaled = scaled.masked_fill(scaled < limit, float("-inf"))
    u = uniform([s.seed for s in sequences], [len(s.token_ids) for s in sequences])
    vocab_size = logits.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    cut = [i for i, p in enumerate(params) if top_k[i] < vocab_size or p.top_p < 1.0]
    chosen: list[int] = [0] * len(params)
    whole = sorted(set(range(len(params))) - set(cut))
    if whole:
        probs = torch.softmax(scaled[whole].double(), dim=-1)
        for i, token in zip(whole, _invert(probs, u[whole]).tolist(), strict=True):
            chosen[i] = token
    if cut:
        limits = torch.tensor([top_k[i] for i in cut])
        top_p = torch.tensor([params[i].top_p for i in cut], dtype=torch.float64)
        for i, token in zip(cut, _draw_cut(scaled[cut], limits, top_p, u[cut]), strict=True):
            chosen[i] = token
    return chosen


def _draw_cut(scaled: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor) -> list[int]:
    """Rows with top-k or top-p: work on the candidates in descending order."""
    vocab_size = scaled.shape[-1]
    with_k = top_k < vocab_size
    count = _TOP_P_CANDIDATES
    if bool(with_k.any()):
        count = max(count, int(top_k[with_k].max()))
    count = min(count, vocab_size)
    values, ids = torch.topk(scaled, count, dim=-1)
    rank = torch.arange(count)[None]
    values = values.masked_fill(rank >= top_k[:, None], float("-inf"))
    # top-p counts what is left after top-k, so those rows normalize over their candidates
    total = torch.where(
        with_k, torch.logsumexp(values.double(), -1), torch.logsumexp(scaled.double(), -1)
    )
    probs = torch.exp(values.double() - total[:, None])
    before = probs.cumsum(-1) - probs
    kept = probs.masked_fill(before >= top_p[:, None], 0.0)
    kept[:, 0] = probs[:, 0]  # the best token always stays, also with top_p = 0
    chosen = ids.gather(1, _invert(kept, u)[:, None])[:, 0].tolist()
    short = ~with_k & (probs.sum(-1) < top_p) & (count < vocab_size)
    for row in torch.nonzero(short)[:, 0].tolist():  # a flat distribution: sort it whole
        chosen[row] = _draw_sorted(scaled[row], float(top_p[row]), u[row : row + 1])
    return list(chosen)


def _draw_sorted(scaled: Tensor, top_p: float, u: Tensor) -> int:
    values, ids = torch.sort(scaled, descending=True)
    probs = torch.softmax(values.double(), dim=-1)
    kept = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)
    return int(ids[int(_invert(kept[None], u)[0])])


def _invert(probs: Tensor, u: Tensor) -> Tensor:
    """First index whose cumulative probability exceeds u times the total. [R, K], [R] -> [R]."""
    cumulative = probs.cumsum(-1)
    target = u[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).to(torch.int8).argmax(-1)
    return torch.minimum(index, last)  # rounding must not reach a token of probability 0


def _logprobs(
    raw: Tensor, token_ids: list[int], wanted: list[int | None]
) -> list[TokenLogprobs | None]:
    """raw: [R, vocab] log-probabilities."""
    chosen = raw.gather(1, torch.tensor(token_ids)[:, None])
    ranks = (raw > chosen).sum(-1).add_(1).tolist()
    values = chosen[:, 0].tolist()
    most = max(count or 0 for count in wanted)
    top_values, top_ids = torch.topk(raw, most, dim=-1) if most else (None, None)
    result: list[TokenLogprobs | None] = []
    for i, count in enumerate(wanted):
        if count is None:
            result.append(None)
            continue
        top: tuple[tuple[int, float], ...] = ()
        if count and top_values is not None and top_ids is not None:
            ids, logprobs = top_ids[i, :count].tolist(), top_values[i, :count].tolist()
            top = tuple(zip(ids, logprobs, strict=True))
        result.append(TokenLogprobs(token_ids[i], values[i], top, ranks[i]))
    return result
