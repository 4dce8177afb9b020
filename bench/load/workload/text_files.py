"""Reads requests with texts: ShareGPT's JSON, and JSON lines with one request each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from bench.load.workload.traces import Part, json_lines, whole
from bench.load.workload.work import Call, Work
from serve.errors import ConfigError, reason
from serve.regular_file import open_regular

MAX_FILE_BYTES = 2 << 30
USER, ASSISTANT = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")
# vLLM's limits: conversations outside them are left out.
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048
CountTokens = Callable[[str], int]
CONTENTS = ("prompt", "messages", "token_ids", "input_len")
KEYS = (*CONTENTS, "output_len", "max_tokens", "timestamp", "client", "group")


def sharegpt_calls(
    path: Path,
    count: int | None,
    seed: int,
    count_tokens: CountTokens,
    output_len: int | None,
    notes: list[str],
) -> list[Call]:
    """Reads [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]}, ...].

    The first question is the prompt; max_tokens is the answer's length, or output_len. The seed
    chooses the conversations. Raises ConfigError."""
    conversations = _json_list(path)
    order = list(range(len(conversations)))
    random.Random(f"sharegpt-{seed}").shuffle(order)
    calls: list[Call] = []
    num_left_out = 0
    for number in order:
        if len(calls) == count:
            break
        pair = _first_turn(conversations[number], f"{path}: conversation {number}")
        call = None if pair is None else _sharegpt_call(*pair, count_tokens, output_len)
        if call is None:
            num_left_out += 1
        else:
            calls.append(call)
    if num_left_out:
        notes.append(
            f"{path}: conversations left out (no question and answer, or not {MIN_TOKENS} to"
            f" {MAX_PROMPT} tokens, {MAX_TOTAL} with the answer): {num_left_out}"
        )
    return calls


def _json_list(path: Path) -> list[Any]:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read")
        with open_regular(path) as file:
            document = orjson.loads(file.read())
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {reason(exc)}") from None
    except orjson.JSONDecodeError as exc:
        raise ConfigError(f"{path}:{exc.lineno}: not JSON: {exc.msg}") from None
    if not isinstance(document, list):
        raise ConfigError(f"{path}: the file must be a JSON list of conversations")
    return document


def _first_turn(conversation: Any, where: str) -> tuple[str, str] | None:
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ConfigError(f'{where}: no "conversations" list')
    spoken = [turn for turn in turns if turn.get("from") != "system"][:2]
    if [turn.get("from") in USER for turn in spoken] != [True, False]:
        return None
    question, answer = (turn.get("value") for turn in spoken)
    if spoken[1].get("from") not in ASSISTANT:
        return None
    if not isinstance(question, str) or not isinstance(answer, str):
        raise ConfigError(f'{where}: a "value" is not text')
    return question, answer


def _sharegpt_call(
    question: str, answer: str, count_tokens: CountTokens, output_len: int | None
) -> Call | None:
    num_prompt = count_tokens(question)
    num_output = count_tokens(answer) if output_len is None else output_len
    is_short = num_prompt < MIN_TOKENS or (output_len is None and num_output < MIN_TOKENS)
    if is_short or num_prompt > MAX_PROMPT or num_prompt + num_output > MAX_TOTAL:
        return None
    work = Work(messages=[{"role": "user", "content": question}], max_tokens=num_output)
    return Call(num_prompt, num_output, num_output, work=work)


def jsonl_calls(
    path: Path, part: Part, count_tokens: CountTokens, output_len: int | None
) -> list[Call]:
    """Reads one object per line, with KEYS. Each has one of CONTENTS, and may have output_len
    (exact) or max_tokens (a limit); otherwise the parameter output_len applies. timestamp is in
    seconds. The calls are in the order of time if all have a timestamp, else of the file. Raises
    ConfigError."""
    calls: list[Call] = []
    first_s: float | None = None
    for call in _requests(path, count_tokens, output_len):
        if call.at_s is not None:
            first_s = call.at_s if first_s is None else first_s
            if not part.includes(call.at_s - first_s):
                continue
        calls.append(call)
        if len(calls) == part.count:
            break
    times = [call.at_s for call in calls if call.at_s is not None]
    if len(times) == len(calls):
        calls.sort(key=lambda call: call.at_s or 0.0)
    return calls


def _requests(path: Path, count_tokens: CountTokens, output_len: int | None) -> Iterator[Call]:
    for row, where in json_lines(path):
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: the line must be a JSON object")
        if unknown := sorted(set(row) - set(KEYS)):
            raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(KEYS)}")
        yield _request(row, where, count_tokens, output_len)


def _request(
    row: dict[str, Any], where: str, count_tokens: CountTokens, output_len: int | None
) -> Call:
    contents = [name for name in CONTENTS if name in row]
    if len(contents) != 1:
        raise ConfigError(f"{where}: exactly one of {', '.join(CONTENTS)} must be given")
    if "output_len" in row and "max_tokens" in row:
        raise ConfigError(f"{where}: output_len and max_tokens exclude each other")
    is_exact = "max_tokens" not in row
    limit = output_len
    for name in ("output_len", "max_tokens"):
        if name in row:
            limit = _positive(row, name, where)
    is_exact = is_exact and limit is not None
    at_s = row.get("timestamp")
    if at_s is not None and (type(at_s) not in (int, float) or not abs(at_s) < 1e300):
        raise ConfigError(f"{where}: timestamp must be a number of seconds")
    client, group = (_name(row, name, where) for name in ("client", "group"))
    num_output = limit if is_exact else None
    if contents == ["input_len"]:
        num_prompt = _positive(row, "input_len", where)
        return Call(num_prompt, num_output, limit, at_s, client, group)
    num_prompt = _size(contents[0], row[contents[0]], where, count_tokens)
    work = Work(
        **{contents[0]: row[contents[0]]},
        max_tokens=limit,
        ignore_eos=is_exact,
        client=client,
        group=group,
    )
    return Call(num_prompt, num_output, limit, at_s, client, group, work=work)


def _positive(row: dict[str, Any], key: str, where: str) -> int:
    if (value := whole(row, key, where)) < 1:
        raise ConfigError(f"{where}: {key} must be at least 1")
    return value


def _name(row: dict[str, Any], key: str, where: str) -> str | None:
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: {key} must be text, not {value!r}")
    return value


def _size(name: str, content: Any, where: str, count_tokens: CountTokens) -> int:
    """Checks a request's content and returns its tokens. Raises ConfigError."""
    if name == "prompt":
        if isinstance(content, str) and content:
            return count_tokens(content)
        raise ConfigError(f"{where}: prompt must be text")
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{where}: {name} must be a list that is not empty")
    if name == "token_ids":
        if all(type(token) is int and token >= 0 for token in content):
            return len(content)
        raise ConfigError(f"{where}: token_ids must be whole numbers")
    if not all(isinstance(message, dict) and "role" in message for message in content):
        raise ConfigError(f"{where}: messages must be objects with a role")
    texts = [message.get("content") for message in content]
    return sum(count_tokens(text) for text in texts if isinstance(text, str))
