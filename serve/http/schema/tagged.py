"""Objects with a field that names their kind: content blocks, items, tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from serve.errors import RequestError
from serve.http.edge.errors import quoted
from serve.http.schema.fields import Record, Schema, Unknown, wrong_type


@dataclass(frozen=True, slots=True)
class Tagged:
    """An object of one of several kinds. kinds: by the value of the field `by`. others: kinds of
    the API that are not supported. default: the kind of an object that names none. check: returns
    the fields of the kind, with `by`."""

    is_object: ClassVar[bool] = True
    kinds: Mapping[str, Record]
    others: tuple[str, ...] = ()
    default: str | None = None
    by: str = "type"

    def check(self, value: Any, where: str, unknown: Unknown) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong_type(where, "an object")
        kind = value.get(self.by)
        if kind is None:
            kind = self.default
        field = f"{where}.{self.by}"
        if kind is None:
            raise RequestError(
                f"{field} is missing", param=field, code="missing_required_parameter"
            )
        if not isinstance(kind, str):
            raise wrong_type(field, "a string")
        record = self.kinds.get(kind)
        if record is None:
            if kind in self.others:
                raise RequestError(
                    f"{field} {quoted(kind)} is not supported",
                    param=field,
                    code="unsupported_parameter",
                )
            names = ", ".join(self.kinds)
            raise RequestError(f"{field} must be one of {names}, not {quoted(kind)}", param=field)
        rest = {name: item for name, item in value.items() if name != self.by}
        return {self.by: kind, **record.check(rest, where, unknown)}

    def schema(self) -> Schema:
        return {"anyOf": [self._one(kind, record) for kind, record in self.kinds.items()]}

    def _one(self, kind: str, record: Record) -> Schema:
        schema = record.schema()
        required = schema.get("required", [])
        return {
            **schema,
            "properties": {self.by: {"const": kind}, **schema["properties"]},
            "required": required if kind == self.default else [self.by, *required],
        }
