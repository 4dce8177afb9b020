"""The command `serve` itself: it suggests the nearest name for a misspelt option."""

from __future__ import annotations

import difflib
from typing import Any

from typer.core import TyperGroup

# options of other servers: what to give instead here
_ELSEWHERE = {
    "--enable-auto-tool-choice": "leave it out: tools are always on",
    "--speculative-config": "use --speculation; how long drafts are is learned",
    "--num-speculative-tokens": "use --max-draft-tokens",
    "--gpu-memory-utilization": "use --kv-cache-bytes, a size such as 8GiB",
    "--tool-call-parser": "use --tool-parser",
}


class SuggestingGroup(TyperGroup):
    """Adds the nearest option to the error for an unknown one, of all commands below it."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        try:
            return super().make_context(*args, **more)
        except Exception as error:
            _suggest(error)
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            _suggest(error)
            raise


def _suggest(error: Any) -> None:
    """Completes typer's NoSuchOption. Its class is known by its attributes, since typer has taken
    it from click and has its own in later versions."""
    context = getattr(error, "ctx", None)
    if context is None or not hasattr(error, "possibilities"):
        return
    given = error.option_name
    if given in _ELSEWHERE:
        error.message = f"No such option: {given}; {_ELSEWHERE[given]}"
        error.possibilities = None
        return
    options = {name.lstrip("-"): name for item in context.command.params for name in _names(item)}
    arguments = [item for item in context.command.params if item.param_type_name == "argument"]
    near = difflib.get_close_matches(
        given.lstrip("-"), [*options, *(item.name for item in arguments)], n=1
    )
    for item in arguments:
        if near == [item.name]:
            usage = f"{context.command_path} {(item.metavar or item.name).upper()}"
            error.message = f"No such option: {given}; give it without an option: {usage}"
            error.possibilities = None
            return
    if near:
        error.message = f"No such option: {given}; did you mean {options[near[0]]}?"
        error.possibilities = None


def _names(item: Any) -> list[str]:
    if item.param_type_name == "argument":
        return []
    return [name for name in (*item.opts, *item.secondary_opts) if name.startswith("--")]
