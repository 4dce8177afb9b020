"""The types that describe structured output; nothing here knows the engine or HTTP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# Options of llguidance. One optional space is allowed after a comma or a colon, as models write it,
# and no other whitespace: some models would otherwise generate nothing else.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
JSON_KINDS = ("json_object", "json_schema")


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that the generated text must have; `source` depends on `kind`.

    "json_schema": the schema as JSON text. "json_object": empty; any JSON object is allowed.
    "choice": the allowed strings as a JSON list. "regex": an expression that the whole text
    matches. "grammar": a grammar in llguidance's dialect of Lark.
    bounded: JSON has no properties that a schema does not name, its numbers fit an int64 or a
    double, and it is completed before max_tokens run out. False takes the schema by its letter;
    None takes the engine's setting for JSON, and False for the %json of a grammar.
    completes: a bounded text is completed before max_tokens run out.
    opened: the source that takes the place of `source` where the prompt ends inside the reasoning,
    which only the rendered prompt tells; "" if both are the same.
    """

    kind: GrammarKind
    source: str = ""
    bounded: bool | None = None
    completes: bool = True
    opened: str = ""

    def after_prompt(self, *, is_open: bool) -> StructuredOutput:
        """Returns the form of the text after a prompt. is_open: it ends inside the reasoning."""
        if not self.opened:
            return self
        return replace(self, source=self.opened if is_open else self.source, opened="")
