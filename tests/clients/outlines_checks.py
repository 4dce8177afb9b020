"""Outlines: objects through its OpenAI, vLLM and SGLang models; choices, types, expressions and
grammars through the one for vLLM, whose fields the server has."""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated, Any, Literal

import openai
import outlines
from checks import BASE, KEY, MODEL, main
from outlines.inputs import Chat
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field

CLIENT = openai.OpenAI(base_url=BASE, api_key=KEY)
OPENAI = outlines.from_openai(CLIENT, MODEL)
VLLM = outlines.from_vllm(CLIENT, MODEL)
SGLANG = outlines.from_sglang(CLIENT, MODEL)


class City(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    inhabitants: int


class Colour(Enum):
    red = "red"
    green = "green"


def check_text() -> None:
    for model in (OPENAI, VLLM, SGLANG):
        assert "5" in model("What is 2 plus 3?", temperature=0)
        chat = Chat([{"role": "user", "content": "What is 2 plus 3?"}])
        assert "5" in "".join(model.stream(chat, temperature=0))


def check_objects() -> None:
    for model in (OPENAI, VLLM, SGLANG):
        City.model_validate_json(model("Rome", City, temperature=0))
        generate = outlines.Generator(model, City)
        City.model_validate_json("".join(generate.stream("Rome", temperature=0)))


def check_choices() -> None:
    assert VLLM("yes or no?", Literal["yes", "no"], temperature=0) in ("yes", "no")
    assert VLLM("Which colour?", Colour, temperature=0) in ("red", "green")


def check_simple_types() -> None:
    assert isinstance(float(VLLM("What is pi?", float, temperature=0)), float)
    assert VLLM("Is it?", bool, temperature=0) in ("True", "False")
    assert isinstance(int(VLLM("What is 2 plus 3?", int, temperature=0)), int)


def check_expressions() -> None:
    pattern = r"[0-9]{3}-[a-f]{2}"
    assert re.fullmatch(pattern, VLLM("A code:", Regex(pattern), temperature=0))


def check_json_object() -> None:
    assert isinstance(OPENAI("An object.", dict, temperature=0), str)


def check_grammar() -> None:
    grammar = CFG('start: "a" "b"+ "c"')
    answer: Any = VLLM("abc", grammar, temperature=0, max_tokens=40)
    assert re.fullmatch("ab+c|ab+", answer)


if __name__ == "__main__":
    main()
