"""What the text of an answer must look like. The types only: no engine, no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# llguidance's: one optional space after a comma or a colon, as models write it; no other space, or
# some would write nothing else.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """kind "json_schema": source is the schema, as JSON text; "choice": the strings, as a JSON
    list; "regex": one expression for the whole text; "grammar": a grammar in Lark's notation, as
    llguidance reads it; "json_object": any object, source is empty."""

    kind: GrammarKind
    source: str = ""
