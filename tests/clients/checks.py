"""What the scripts of this folder share: where the servers are, and running the checks.

Each script runs in an environment that has client libraries but not this project, so this module
imports the standard library only.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
from typing import Any

# `serve run` with the embedded model, such as http://127.0.0.1:8000
ROOT = os.environ["CLIENTS_ROOT"]
BASE = f"{ROOT}/v1"
# the same server over a model whose answers are in the user's text, for loops over tools
DICTATED_ROOT = os.environ["CLIENTS_DICTATED_ROOT"]
DICTATED = f"{DICTATED_ROOT}/v1"
MODEL = "mergestep-default"
KEY = "none"
MAX_TRACE = 600  # characters of a failure that are shown


def say(*answers: str) -> str:
    """Returns a text of the user at which the dictated model gives these answers in turn."""
    return "Do it. " + " ".join(f"SAY<<{answer}>>" for answer in answers)


def calls(*named: tuple[str, dict[str, Any]]) -> str:
    """Returns an answer of the model with calls of tools."""
    made = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in named]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in made)


# For each format of calls: a server whose model speaks it, and a text of the user at which
# that model calls `add` twice, each time after the other's result, and then says SUMMED.
FORMATS: dict[str, tuple[str, str]] = {
    name: (f"{root}/v1", text)
    for name, (root, text) in json.loads(os.environ["CLIENTS_FORMATS"]).items()
}
SUMMED = "5 and 2."
TWO_SUMS = say(calls(("add", {"a": 2, "b": 3}), ("add", {"a": 1, "b": 1})), SUMMED)


def main() -> None:
    """Runs the functions of the script whose names begin with `check_`, in their order; those named
    in the command line if any are. Exits with 1 if one has failed."""
    module: dict[str, Any] = vars(sys.modules["__main__"])
    checks = {name[6:]: value for name, value in module.items() if name.startswith("check_")}
    failed = []
    with asyncio.Runner() as runner:  # one loop, since clients keep their connections
        for name in sys.argv[1:] or checks:
            start_s = time.monotonic()
            try:
                result = checks[name]()
                if inspect.iscoroutine(result):
                    runner.run(result)
            except Exception:
                failed.append(name)
                print(f"FAILED {name}\n{traceback.format_exc(limit=-3)[-MAX_TRACE:]}", flush=True)
            else:
                print(f"passed {name} in {time.monotonic() - start_s:.1f} s", flush=True)
    print(f"{len(checks)} checks; failed: {', '.join(failed) or 'none'}", flush=True)
    sys.exit(bool(failed))
