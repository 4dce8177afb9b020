"""Every field of the tables has a bound, and its schema agrees with its check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from serve.errors import RequestError
from serve.http.openai.requests import CHAT, COMPLETION
from serve.http.schema.fields import Record, Schema, Unknown

TABLES = {"completions": COMPLETION, "chat": CHAT}
# These objects have free fields; their own parsers bound the size, and other tests check it.
FREE = {"messages", "guided_json", "structured_outputs.json", "response_format"}


def _parts(schema: Schema, where: str) -> Iterator[tuple[str, Schema]]:
    yield where, schema
    for name, part in schema.get("properties", {}).items():
        yield from _parts(part, f"{where}.{name}" if where else name)
    for part in (*schema.get("anyOf", ()), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(part, dict):
            yield from _parts(part, where)


@pytest.mark.parametrize("name", TABLES)
def test_every_field_has_a_bound(name: str) -> None:
    parts = list(_parts(TABLES[name].schema(), ""))
    assert len(parts) > 40
    for where, schema in parts:
        if any(where == free or where.startswith(f"{free}.") for free in FREE):
            continue
        assert _is_bounded(schema), (where, schema)


def _is_bounded(schema: Schema) -> bool:
    if "enum" in schema or "const" in schema or "anyOf" in schema:
        return True
    kind = schema["type"]
    match kind[0] if isinstance(kind, list) else kind:
        case "integer" | "number":
            return "minimum" in schema and "maximum" in schema
        case "string":
            return "maxLength" in schema
        case "array":
            return "maxItems" in schema and "items" in schema
        case "object":
            return "properties" in schema or "maxProperties" in schema
        case other_kind:
            return other_kind in ("boolean", "null")


@pytest.mark.parametrize("name", TABLES)
def test_schema_and_check_agree_at_the_borders(name: str) -> None:
    """Values just inside a bound are accepted by both, and values just outside by neither."""
    table = TABLES[name]
    num_checked = 0
    for field, kind in table.fields.items():
        if field in FREE:
            continue
        for value in _borders(kind.schema()):
            is_valid = jsonschema.Draft202012Validator(kind.schema()).is_valid(value)
            assert _is_accepted(table, field, value) == is_valid, (field, str(value)[:80])
            num_checked += 1
    assert num_checked > 100


def _borders(schema: Schema) -> Iterator[Any]:
    for part in schema.get("anyOf", ()):
        yield from _borders(part)
    yield from ("\0", {}, [], True, 5, -(2**70), 2**70, [[]], ["\0"], "x")
    if "minimum" in schema:
        low, high = schema["minimum"], schema["maximum"]
        yield from (low, high, low - 1, high + 1)
    if "maxLength" in schema and schema["maxLength"] < 1 << 20:
        yield from ("a" * schema["maxLength"], "a" * (schema["maxLength"] + 1), "")
    if "maxItems" in schema and schema["maxItems"] < 1 << 13 and "type" in schema["items"]:
        item: Any = "a" if schema["items"]["type"] == "string" else 5
        if schema["items"]["type"] in ("string", "integer"):
            yield from ([item] * schema["maxItems"], [item] * (schema["maxItems"] + 1))
    yield from schema.get("enum", ())


def _is_accepted(table: Record, field: str, value: Any) -> bool:
    try:
        table.fields[field].check(value, field, Unknown())
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("name", TABLES)
def test_the_documentation_has_every_field(name: str) -> None:
    docs = Path(__file__).parents[4] / "docs"
    text = "".join((docs / page).read_text() for page in ("http-api.md", "tools.md"))
    missing = [field for field in TABLES[name].fields if f"`{field}`" not in text]
    assert not missing
