"""Checks a tokenized request before it may enter the loop.

Every mistake is reported here, with the parameter's name, so that later code need not check.
Token ids are compared with the width of the logits, which may exceed the tokenizer's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from memory.policies.setting import EVICTIONS, OFF, KVPolicy, policy_of_request
from serve.errors import ContextLengthError, RequestError
from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.structured.reasoning_limit import ReasoningEnd
from serve.text.tokenizer import Tokenizer, check_encodable

SURE_CHARS = 4  # for each token of the context: longer texts are counted in pieces first
PIECE_CHARS = 1 << 16
CUT_MARGIN = 1.125  # a cut makes a few tokens more


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on requests.

    max_model_len: tokens of prompt and output together. vocab_size: width of the logits.
    max_num_waiting: sequences that may wait beside the max_num_seqs running ones. ttft_slo_s:
    requests whose first token is predicted to come later are refused. embedding_size: the most
    dimensions of an embedding, if known. bounded_json: see EngineConfig. reasoning: how the
    model's reasoning is ended before its time; None if it has none that is marked. kv_policy: what
    the engine reads or keeps of K/V; None: everything.
    """

    max_model_len: int
    vocab_size: int
    max_num_waiting: int
    max_num_seqs: int
    ttft_slo_s: float | None = None
    embedding_size: int | None = None
    bounded_json: bool = True
    reasoning: ReasoningEnd | None = None
    kv_policy: KVPolicy | None = None


def check_request(request: Request, token_ids: Sequence[int], limits: RequestLimits) -> Request:
    """Returns the request with its token ids and with max_tokens resolved. Raises RequestError or
    ContextLengthError."""
    params, pooling, vocab_size = request.params, request.pooling, limits.vocab_size
    if not isinstance(token_ids, (list, tuple)) or not token_ids:
        raise RequestError("the prompt is empty", param="prompt", code="invalid_prompt")
    size = limits.embedding_size
    if size is not None and pooling is not None and (pooling.dimensions or 0) > size:
        raise RequestError(f"an embedding has {size} dimensions", param="dimensions")
    _check_ids("logit_bias", params.logit_bias or {}, vocab_size)
    _check_ids("stop_token_ids", params.stop_ids, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    room = limits.max_model_len - len(token_ids)
    _check_room(room, len(token_ids), params, limits)  # cheap, so before the look at each id
    if not all(_is_token(token, vocab_size) for token in token_ids):
        raise RequestError(f"token ids must be integers from 0 to {vocab_size - 1}", param="prompt")
    if params.max_tokens is None:
        params = params.changed(max_tokens=params.most_tokens(room))
    _check_answers(params, vocab_size)
    if params.kv_policy is not None:
        params = _with_policy(params, limits.kv_policy)
    return replace(request, prompt_token_ids=tuple(token_ids), params=params)


def _with_policy(params: SamplingParams, policy: KVPolicy | None) -> SamplingParams:
    """Returns the parameters of a request that names a kv_policy. policy: the engine's."""
    assert params.kv_policy is not None
    wanted = policy_of_request(params.kv_policy)
    if wanted == policy:
        return params.changed(kv_policy=None)
    if policy is not None and policy.selects and (wanted is None or wanted.selects):
        # K/V of other answers differs, so these requests share theirs only with one another.
        name = OFF if wanted is None else wanted.key
        return params.changed(cache_salt=f"{params.cache_salt or ''}.kv_policy={name}")
    drops_own = wanted is not None and wanted.evicts and policy is not None and policy.evicts
    if wanted is not None and not drops_own:
        raise RequestError(_refusal(wanted, policy), param="kv_policy")
    return params  # all cached K/V is whole where an engine drops some


def _refusal(wanted: KVPolicy, policy: KVPolicy | None) -> str:
    """Returns why a request cannot have the policy that it names."""
    if policy is None:
        lacks = "drops nothing" if wanted.evicts else "keeps nothing to choose by"
        why, allowed = f"{OFF}, so it {lacks}", OFF
    elif policy.selects:
        why, allowed = policy.name, f"{OFF} or {policy.name}:budget=AMOUNT"
    else:
        names = f"{', '.join(EVICTIONS[:-1])} or {EVICTIONS[-1]}"
        why, allowed = policy.setting, f"{OFF} or NAME:budget=AMOUNT, where NAME is {names}"
    return (
        f"kv_policy {wanted.name!r} cannot be used by a request here: the server runs with"
        f" kv_policy {why}; a request may say {allowed}"
    )


def _check_answers(params: SamplingParams, vocab_size: int) -> None:
    """Checks the answers so far. params: max_tokens is resolved."""
    most = params.max_tokens or 0
    for answer in params.answers_so_far:
        tokens = answer.token_ids
        if not tokens:
            continue
        if len(tokens) + (answer.finish_reason is None) > most:
            raise RequestError(
                f"an answer so far has {len(tokens)} tokens, and max_tokens is {most}",
                param="answers_so_far",
            )
        if not all(_is_token(token, vocab_size) for token in tokens):
            raise RequestError(
                f"token ids must be integers from 0 to {vocab_size - 1}", param="answers_so_far"
            )


def check_text(
    text: str, tokenizer: Tokenizer, limits: RequestLimits, *, is_cut: bool = False
) -> None:
    """Raises ContextLengthError for a text that cannot fit whatever its tokens are, before time
    is spent on tokenizing it. A long text that may fit is counted in pieces, unless it is cut to a
    number of tokens afterwards."""
    longest, most = tokenizer.max_piece_bytes, limits.max_model_len
    if longest is not None and len(text) > most * longest:
        raise _too_long(most, 0, f"at least {-(-len(text) // longest)}")
    if is_cut or len(text) <= max(PIECE_CHARS, SURE_CHARS * most):
        return
    check_encodable(text)
    count = 0
    for start in range(0, len(text), PIECE_CHARS):
        piece = text[start : start + PIECE_CHARS]
        count += len(tokenizer.encode(piece, add_special_tokens=False))
        if count > CUT_MARGIN * most:
            raise _too_long(most, 0, f"at least {most + 1}")


def _too_long(context: int, num_output: int, num_prompt: int | str) -> ContextLengthError:
    # Clients shorten the conversation when they find these words: LiteLLM and pydantic-ai the first
    # ones, LangChain "prompt is too long", and Claude Code reads the two numbers after them.
    return ContextLengthError(
        f"{_context(context)}, and the prompt is too long: {num_prompt} tokens > "
        f"{context - num_output} maximum",
        param="prompt",
    )


def _context(num_tokens: int) -> str:
    return f"This model's maximum context length is {num_tokens} tokens"


def _is_token(token: object, vocab_size: int) -> bool:
    return type(token) is int and 0 <= token < vocab_size


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    if max(token_ids, default=-1) >= vocab_size:
        raise RequestError(f"{name} holds a token id above {vocab_size - 1}", param=name)


def _check_room(room: int, num_prompt: int, params: SamplingParams, limits: RequestLimits) -> None:
    """room: tokens of the context that the prompt leaves."""
    needed = 1 if params.max_tokens is None else params.max_tokens
    if room < min(needed, 1):
        raise _too_long(limits.max_model_len, min(needed, 1), num_prompt)
    if room < needed:
        raise ContextLengthError(
            f"{_context(limits.max_model_len)}, but the prompt has {num_prompt} and max_tokens is "
            f"{needed}",
            param="max_tokens",
        )
    if params.max_tokens is None and params.min_tokens > room:
        raise RequestError(f"min_tokens is above {room}", param="min_tokens")
