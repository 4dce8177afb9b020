"""An engine in one process imports nothing of what several processes need."""

from __future__ import annotations

from tests.support.engine.child import output_of

DISTRIBUTED = ("serve.group.", "serve.cluster.", "serve.converter.", "memory.nodes.", "transport.")
CODE = f"""
import sys
import serve.cli.server_process
from serve import LLM, SamplingParams

with LLM(kv_cache_bytes=64 << 20) as llm:
    llm.generate("a", SamplingParams(max_tokens=2))
for name in sys.modules:
    if (name + ".").startswith({DISTRIBUTED}):
        print(name)
"""


def test_one_process_imports_no_other_process() -> None:
    found = set(output_of("-c", CODE).splitlines())
    assert found <= {"memory.nodes", "memory.nodes.errors"}, sorted(found)
