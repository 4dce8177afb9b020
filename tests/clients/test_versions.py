"""docs/clients.md has the versions of the libraries that `make clients` installs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "LiteLLM": "litellm",
    "pydantic-ai": "pydantic-ai-slim",
    "Outlines": "outlines",
    "LlamaIndex": "llama-index-core",
    "GuideLLM": "guidellm",
    "AIPerf": "aiperf",
}


def test_versions_of_the_docs() -> None:
    locked: dict[str, set[str]] = {}
    for file in (Path(__file__).parent / "requirements").glob("*.txt"):
        for name, version in re.findall(r"^([\w-]+)==([\w.]+)", file.read_text(), re.MULTILINE):
            locked.setdefault(name, set()).add(version)
    page = (ROOT / "docs" / "clients.md").read_text().split("## Programs")[0]
    rows = re.findall(r"^\| ([\w-]+) \| ([\d., ]+) \|", page, re.MULTILINE)
    assert len(rows) == 12
    for library, versions in rows:
        assert set(versions.split(", ")) == locked[PACKAGES.get(library, library)], library
