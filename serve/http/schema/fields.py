"""Types of fields: each checks a value and describes itself as JSON Schema.

null counts as absent. Each error names its parameter; each number, list and string has a bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import orjson

from serve.errors import RequestError
from serve.http.edge.errors import quoted

MAX_NAME_CHARS = 512
MAX_LISTED = 8
MAX_WARNED = 32
Schema = dict[str, Any]


class Unknown:
    """Refuses unknown parameters, or collects them in `names`. left_out: what the answer does
    without although the API has it, in words."""

    def __init__(self, *, refuse: bool = True) -> None:
        self.refuse = refuse
        self.names: list[str] = []
        self.left_out: list[str] = []

    def without_refusal(self) -> Unknown:
        """Returns one that collects names in the same list, whatever the setting is."""
        same = Unknown(refuse=False)
        same.names, same.left_out = self.names, self.left_out
        return same

    def note(self, where: str, names: list[str]) -> None:
        """where: the path of the object that has the names; empty for the body itself."""
        prefix = f"{where}." if where else ""
        if self.refuse:
            listed = ", ".join(quoted(name) for name in sorted(names)[:MAX_LISTED])
            raise RequestError(
                f"unknown parameter {listed}{f' in {where}' if where else ''}",
                param=prefix + names[0][:MAX_NAME_CHARS],
                code="unknown_parameter",
            )
        free = MAX_WARNED - len(self.names)
        self.names += [prefix + name for name in names[:free]]


class FieldType(Protocol):
    """The type of a field. check: returns the value to use for a JSON value, or raises
    RequestError, which names the path `where`."""

    def check(self, value: Any, where: str, unknown: Unknown) -> Any: ...
    def schema(self) -> Schema: ...


@dataclass(frozen=True, slots=True)
class Integer:
    minimum: int
    maximum: int

    def check(self, value: Any, where: str, unknown: Unknown) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(where, "an integer")
        if not self.minimum <= value <= self.maximum:
            raise RequestError(
                f"{where} must be between {self.minimum} and {self.maximum}", param=where
            )
        return value

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True, slots=True)
class Number:
    minimum: float
    maximum: float

    def check(self, value: Any, where: str, unknown: Unknown) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong_type(where, "a number")
        if not self.minimum <= value <= self.maximum:
            raise RequestError(
                f"{where} must be between {self.minimum:g} and {self.maximum:g}", param=where
            )
        return value

    def schema(self) -> Schema:
        return {"type": "number", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True, slots=True)
class Boolean:
    def check(self, value: Any, where: str, unknown: Unknown) -> bool:
        if not isinstance(value, bool):
            raise wrong_type(where, "true or false")
        return value

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class String:
    """A string, without NUL unless it is text for the model. pattern: matches the whole string.
    if_empty: the error code of a string that is too short."""

    max_chars: int
    min_chars: int = 0
    pattern: str | None = None
    is_text: bool = False
    if_empty: str = "invalid_value"

    def check(self, value: Any, where: str, unknown: Unknown) -> str:
        if not isinstance(value, str):
            raise wrong_type(where, "a string")
        if len(value) > self.max_chars:
            raise RequestError(
                f"{where} is longer than {self.max_chars} characters",
                param=where,
                code="string_above_max_length",
            )
        if len(value) < self.min_chars:
            raise RequestError(f"{where} is empty", param=where, code=self.if_empty)
        if not self.is_text and "\0" in value:
            raise RequestError(f"{where} has a NUL character", param=where)
        if self.pattern is not None and not re.fullmatch(self.pattern, value):
            raise RequestError(f"{where} must match {self.pattern}", param=where)
        return value

    def schema(self) -> Schema:
        schema: Schema = {"type": "string", "maxLength": self.max_chars}
        if self.min_chars:
            schema["minLength"] = self.min_chars
        if self.pattern is not None:
            schema["pattern"] = f"^{self.pattern}$"
        elif not self.is_text:
            schema["pattern"] = "^[^\\u0000]*$"
        return schema


@dataclass(frozen=True, slots=True)
class OneOfNames:
    """A field whose value is one of a few names."""

    names: tuple[str, ...]

    def check(self, value: Any, where: str, unknown: Unknown) -> str:
        if not isinstance(value, str):
            raise wrong_type(where, "a string")
        if value not in self.names:
            raise RequestError(
                f"{where} must be one of {', '.join(self.names)}, not {quoted(value)}", param=where
            )
        return value

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.names)}


@dataclass(frozen=True, slots=True)
class List:
    """A list. The text of an error names the item, its param too where items are objects."""

    item: FieldType
    max_items: int
    min_items: int = 0

    def check(self, value: Any, where: str, unknown: Unknown) -> list[Any]:
        if not isinstance(value, list):
            raise wrong_type(where, "a list")
        check_length(value, where, self.max_items)
        if len(value) < self.min_items:
            message = f"must have at least {self.min_items}" if value else "is empty"
            raise RequestError(f"{where} {message}", param=where)
        checked = []
        try:
            for position, item in enumerate(value):
                checked.append(self.item.check(item, f"{where}[{position}]", unknown))
        except RequestError as error:
            param = error.param if getattr(self.item, "is_object", False) else where
            raise RequestError(str(error), param=param, code=error.code) from None
        return checked

    def schema(self) -> Schema:
        schema: Schema = {
            "type": "array",
            "items": self.item.schema(),
            "maxItems": self.max_items,
        }
        return {**schema, "minItems": self.min_items} if self.min_items else schema


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids of any vocabulary; the engine compares them with the model's own."""

    max_items: int
    min_items: int = 0

    def check(self, value: Any, where: str, unknown: Unknown) -> list[int]:
        if not isinstance(value, list):
            raise wrong_type(where, "a list of integers")
        check_length(value, where, self.max_items)
        if len(value) < self.min_items:
            raise RequestError(f"{where} has no tokens", param=where)
        for token in value:
            if type(token) is not int:
                raise wrong_type(where, "a list of integers")
            if not 0 <= token < MAX_TOKEN_ID:
                raise RequestError(f"{where} has a token id that is out of range", param=where)
        return value

    def schema(self) -> Schema:
        item = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID - 1}
        schema: Schema = {"type": "array", "items": item, "maxItems": self.max_items}
        return {**schema, "minItems": self.min_items} if self.min_items else schema


MAX_TOKEN_ID = 1 << 31


@dataclass(frozen=True, slots=True)
class Record:
    """An object with these fields. check: returns the given fields without nulls."""

    is_object: ClassVar[bool] = True
    fields: Mapping[str, FieldType]
    required: tuple[str, ...] = ()

    def check(self, value: Any, where: str, unknown: Unknown) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong_type(where, "an object")
        given = {name: item for name, item in value.items() if item is not None}
        prefix = f"{where}." if where else ""
        if isinstance(self.fields.get("type"), OneOfNames) and "type" in given:
            # checked first: an object of another type has other fields
            self.fields["type"].check(given["type"], prefix + "type", unknown)
        others = [name for name in given if name not in self.fields]
        if others:
            unknown.note(where, others)
        for name in self.required:
            if name not in given:
                raise RequestError(
                    f"{prefix}{name} is missing",
                    param=prefix + name,
                    code="missing_required_parameter",
                )
        return {
            name: kind.check(given[name], prefix + name, unknown)
            for name, kind in self.fields.items()
            if name in given
        }

    def schema(self) -> Schema:
        schema: Schema = {
            "type": "object",
            "properties": {
                name: kind.schema() if name in self.required else nullable(kind.schema())
                for name, kind in self.fields.items()
            },
            "additionalProperties": {"type": "null"},
        }
        return {**schema, "required": list(self.required)} if self.required else schema


@dataclass(frozen=True, slots=True)
class Map:
    """An object with any keys. key: their pattern; keys: the pattern in words."""

    value: FieldType
    max_entries: int
    key: str
    keys: str

    def check(self, value: Any, where: str, unknown: Unknown) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong_type(where, "an object")
        check_length(value, where, self.max_entries)
        for key in value:
            if not re.fullmatch(self.key, key):
                raise RequestError(
                    f"{where} has the key {quoted(key)}, which is not {self.keys}", param=where
                )
        return {key: self.value.check(item, where, unknown) for key, item in value.items()}

    def schema(self) -> Schema:
        return {
            "type": "object",
            "additionalProperties": self.value.schema(),
            "propertyNames": {"pattern": f"^{self.key}$"},
            "maxProperties": self.max_entries,
        }


@dataclass(frozen=True, slots=True)
class Either:
    """The field type by the JSON type of the value. wanted: the types in words."""

    kinds: Mapping[type, FieldType]
    wanted: str

    def check(self, value: Any, where: str, unknown: Unknown) -> Any:
        kind = self.kinds.get(type(value))
        if kind is None:
            raise wrong_type(where, self.wanted)
        return kind.check(value, where, unknown)

    def schema(self) -> Schema:
        return {"anyOf": [kind.schema() for kind in self.kinds.values()]}


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any object of at most max_bytes of JSON text."""

    max_bytes: int

    def check(self, value: Any, where: str, unknown: Unknown) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong_type(where, "an object")
        try:
            size = len(orjson.dumps(value))
        except TypeError:  # integers that need more than 64 bits
            raise RequestError(f"{where} has a number that is out of range", param=where) from None
        if size > self.max_bytes:
            raise RequestError(
                f"{where} is larger than {self.max_bytes} bytes of JSON", param=where
            )
        return value

    def schema(self) -> Schema:
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A parameter of the API that this server lacks. The neutral values have no effect and are
    accepted."""

    neutral: tuple[Any, ...] = ()

    def check(self, value: Any, where: str, unknown: Unknown) -> Any:
        if not any(type(value) is type(item) and value == item for item in self.neutral):
            raise unsupported(where)
        return value

    def schema(self) -> Schema:
        return {"enum": list(self.neutral)} if self.neutral else {"type": "null"}


@dataclass(frozen=True, slots=True)
class Parsed:
    """A value that `parse` makes of (value, path, unknown). described: its schema."""

    parse: Callable[[Any, str, Unknown], Any]
    described: Schema = field(hash=False)

    def check(self, value: Any, where: str, unknown: Unknown) -> Any:
        return self.parse(value, where, unknown)

    def schema(self) -> Schema:
        return self.described


def wrong_type(where: str, wanted: str) -> RequestError:
    return RequestError(f"{where} must be {wanted}", param=where, code="invalid_type")


def unsupported(where: str, why: str = "") -> RequestError:
    return RequestError(f"{where} is not supported{why}", param=where, code="unsupported_parameter")


def check_length(value: list[Any] | dict[str, Any], where: str, max_items: int) -> None:
    if len(value) > max_items:
        raise RequestError(
            f"{where} has more than {max_items} entries",
            param=where,
            code="array_above_max_length",
        )


def nullable(schema: Schema) -> Schema:
    """Returns the schema of an optional field, which may be null."""
    kind = schema.get("type")
    if kind == "null" or "null" in (kind if isinstance(kind, list) else ()):
        return schema
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "enum" in schema:
        types = {} if kind is None else {"type": [kind, "null"]}
        return {**schema, **types, "enum": [*schema["enum"], None]}
    if not isinstance(kind, str):
        return {"anyOf": [schema, {"type": "null"}]}
    return {**schema, "type": [kind, "null"]}
