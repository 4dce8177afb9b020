"""The prompts of completions and embeddings: a text, texts, token ids, or lists of token ids."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from serve.errors import RequestError
from serve.http.edge.large_json import SENT_PIECE
from serve.http.edge.memory_budget import Charge, encode_bytes
from serve.http.schema.fields import MAX_TOKEN_ID, Parsed, Schema, Unknown, check_length, wrong_type
from serve.request import Prompt
from serve.text.tokenizer import Tokenizer

MAX_PROMPTS = 1024
MAX_PROMPT_CHARS = 8 << 20
MAX_PROMPT_TOKENS = 1 << 22
CHARGED_CHARS = 1 << 16  # texts that are cut are charged beyond that
_FORMS = "a string, a list of strings, token ids or lists of token ids"


def parse_prompts(value: Any, where: str, max_prompts: int) -> list[Prompt]:
    if isinstance(value, str):
        return [_text(value, where)]
    if not isinstance(value, list):
        raise wrong_type(where, _FORMS)
    if not value:
        raise RequestError(f"{where} is an empty list", param=where, code="invalid_prompt")
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [_token_ids(value, where)]
    check_length(value, where, max_prompts)
    if all(isinstance(item, str) for item in value):
        return [_text(item, where) for item in value]
    if all(isinstance(item, list) for item in value):
        return [_token_ids(item, where) for item in value]
    raise wrong_type(where, "only strings, only token ids or only lists of token ids")


def _text(value: str, where: str) -> str:
    if len(value) > MAX_PROMPT_CHARS:
        raise RequestError(
            f"{where} is longer than {MAX_PROMPT_CHARS} characters",
            param=where,
            code="string_above_max_length",
        )
    return value


def _token_ids(value: list[Any], where: str) -> Prompt:
    if not value:
        raise RequestError(f"{where} has no tokens", param=where, code="invalid_prompt")
    check_length(value, where, MAX_PROMPT_TOKENS)
    for token in value:
        if type(token) is not int:
            raise wrong_type(where, "token ids that are integers")
        if not 0 <= token < MAX_TOKEN_ID:
            raise RequestError(f"{where} has a token id that is out of range", param=where)
    return {"prompt_token_ids": value}


_TEXT_SCHEMA: Schema = {"type": "string", "maxLength": MAX_PROMPT_CHARS}
_TOKENS_SCHEMA: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID - 1},
    "minItems": 1,
    "maxItems": MAX_PROMPT_TOKENS,
}


def prompts_field(max_prompts: int) -> Parsed:
    """Returns a field that parses any of the four forms to a list of prompts."""

    def parse(value: Any, where: str, unknown: Unknown) -> list[Prompt]:
        return parse_prompts(value, where, max_prompts)

    def several(form: Schema) -> Schema:
        return {"type": "array", "items": form, "minItems": 1, "maxItems": max_prompts}

    forms = [_TEXT_SCHEMA, several(_TEXT_SCHEMA), _TOKENS_SCHEMA, several(_TOKENS_SCHEMA)]
    return Parsed(parse, {"anyOf": forms})


async def charge_encoding(text: str, tokenizer: Tokenizer, charge: Charge, param: str) -> int:
    """Charges what it takes to encode a text, and returns how much that is."""
    needed = encode_bytes(text)
    charge.add(needed, param)
    if tokenizer.max_growth > 1.0:
        growth = await charge.run(lambda: tokenizer.growth(text))
        charge.add(encode_bytes(text, growth) - needed, param)
        needed = encode_bytes(text, growth)
    return needed


async def cut_long_texts(
    prompts: list[Prompt], tokenizer: Tokenizer, charge: Charge, param: str
) -> list[Prompt]:
    """Returns the prompts with the token ids of long texts that are cut to a number of tokens. Such
    a text may be far longer than the context, so it is charged while it is encoded."""
    made: list[Prompt] = []
    for prompt in prompts:
        given: dict[str, Any] = dict(prompt) if isinstance(prompt, dict) else {}
        text, size = given.get("prompt"), given.get("truncate_prompt_tokens")
        if isinstance(text, str) and size is not None and len(text) > CHARGED_CHARS:
            num_bytes = await charge_encoding(text, tokenizer, charge, param)
            encode = partial(_encode_cut, text, tokenizer, given)
            prompt = {"prompt_token_ids": await charge.run(encode), "truncate_prompt_tokens": size}
            charge.reduce(num_bytes)
        made.append(prompt)
    return made


def _encode_cut(text: str, tokenizer: Tokenizer, given: Mapping[str, Any]) -> list[int]:
    special = given.get("add_special_tokens", True)
    token_ids = tokenizer.encode(text, add_special_tokens=special)
    excess = len(token_ids) - given["truncate_prompt_tokens"]
    if given.get("truncation_side", "left") == "left":
        token_ids.reverse()
    while excess > 0:  # freeing all at once would hold the interpreter for too long
        del token_ids[-min(excess, SENT_PIECE) :]
        excess -= SENT_PIECE
    if given.get("truncation_side", "left") == "left":
        token_ids.reverse()
    return token_ids


def with_options(prompt: Prompt, values: Mapping[str, Any]) -> Prompt:
    """Returns the prompt with the options of the fields for its tokens."""
    names = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")
    options = {name: values[name] for name in names if name in values}
    if not options:
        return prompt
    whole: Any = {"prompt": prompt} if isinstance(prompt, str) else prompt
    cut: Prompt = whole | options
    return cut
