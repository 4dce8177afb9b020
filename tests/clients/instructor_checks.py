"""instructor: its modes over chat completions, Responses and Messages, lists, partial objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import anthropic
import instructor
import openai
from checks import BASE, DICTATED, KEY, MODEL, ROOT, calls, main, say
from pydantic import BaseModel, Field, field_validator

SYSTEM = {"role": "system", "content": "Extract."}
TEXT = {"role": "user", "content": "Anna is 7 and lives in Rome."}
OPTIONS: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_retries": 0}


class User(BaseModel):
    """A user."""

    name: Annotated[str, Field(max_length=12)]
    age: int
    city: Literal["Rome", "Paris"]


class Weather(BaseModel):
    city: Literal["Rome", "Paris"]


class Anything(BaseModel):
    """An object."""


def client(mode: instructor.Mode, base_url: str = BASE) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=base_url, api_key=KEY), mode=mode)


def create(mode: instructor.Mode, model: Any = User, **options: Any) -> Any:
    messages = [SYSTEM, TEXT]
    return client(mode).chat.completions.create(
        response_model=model, messages=messages, **OPTIONS, **options
    )


def check_tools() -> None:
    assert isinstance(create(instructor.Mode.TOOLS), User)


def check_tools_strict() -> None:
    assert isinstance(create(instructor.Mode.TOOLS_STRICT), User)


def check_json_schema() -> None:
    assert isinstance(create(instructor.Mode.JSON_SCHEMA), User)


def check_json() -> None:
    assert isinstance(create(instructor.Mode.JSON, Anything), Anything)


def check_parallel_tools() -> None:
    """The library leaves the choice to the model, which has to call."""
    anna = {"name": "Anna", "age": 7, "city": "Rome"}
    text = say(calls(("Weather", {"city": "Rome"}), ("User", anna)))
    made = client(instructor.Mode.PARALLEL_TOOLS, DICTATED).create(
        response_model=Iterable[Weather | User],
        messages=[{"role": "user", "content": text}],
        **OPTIONS,
    )
    assert list(made) == [Weather(city="Rome"), User(**anna)]


def check_json_in_markdown() -> None:
    """The library only asks for JSON here, and the model has to write it."""
    text = say('```json\n{"name": "Anna", "age": 7, "city": "Rome"}\n```')
    user = client(instructor.Mode.MD_JSON, DICTATED).create(
        response_model=User, messages=[{"role": "user", "content": text}], **OPTIONS
    )
    assert user.age == 7


def check_asking_again_after_an_invalid_answer() -> None:
    """The history has the refused call, and the library's complaint."""

    class Even(BaseModel):
        number: int

        @field_validator("number")
        @classmethod
        def is_even(cls, number: int) -> int:
            if number % 2:
                raise ValueError("the number must be even")
            return number

    text = say(calls(("Even", {"number": 3})), calls(("Even", {"number": 4})))
    even = client(instructor.Mode.TOOLS, DICTATED).create(
        response_model=Even,
        messages=[{"role": "user", "content": text}],
        **OPTIONS | {"max_retries": 2},
    )
    assert even.number == 4


def check_responses_tools() -> None:
    made = client(instructor.Mode.RESPONSES_TOOLS)
    user = made.responses.create(input=TEXT["content"], response_model=User, **OPTIONS)
    assert isinstance(user, User)


def check_response_and_usage() -> None:
    user, completion = client(instructor.Mode.TOOLS).create_with_completion(
        response_model=User, messages=[TEXT], **OPTIONS
    )
    assert isinstance(user, User) and completion.usage.completion_tokens > 0


def check_partial() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        parts = list(client(mode).create_partial(response_model=User, messages=[TEXT], **OPTIONS))
        assert len(parts) > 1 and User.model_validate(parts[-1].model_dump())


def check_iterable() -> None:
    class Fruit(BaseModel):
        name: Literal["apple", "pear"]

    class Basket(BaseModel):
        fruits: Annotated[list[Fruit], Field(max_length=4)]

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        assert isinstance(create(mode, Basket), Basket)


async def check_async() -> None:
    made = instructor.from_openai(openai.AsyncOpenAI(base_url=BASE, api_key=KEY))
    user = await made.create(response_model=User, messages=[TEXT], **OPTIONS)
    assert isinstance(user, User)


def check_anthropic_modes() -> None:
    for mode in (instructor.Mode.ANTHROPIC_TOOLS,):
        made = instructor.from_anthropic(anthropic.Anthropic(base_url=ROOT, api_key=KEY), mode=mode)
        user = made.messages.create(
            model=MODEL, response_model=User, max_tokens=300, max_retries=0, messages=[TEXT]
        )
        assert isinstance(user, User)


if __name__ == "__main__":
    main()
