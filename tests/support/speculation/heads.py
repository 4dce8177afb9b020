"""Models with a head that drafts, and answers of theirs that are compared with those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serve import LLM
from tests.support.engine.checkpoints import checkpoint
from tests.support.models.draft_heads import write_eagle3, write_mtp
from tests.support.speculation.mixed_requests import requests, results
from tests.support.speculation.scripted import always_draft

SMALL: dict[str, Any] = {"max_num_seqs": 5, "max_model_len": 160, "max_num_batched_tokens": 600}
PLAIN: dict[str, Any] = {"speculation": "off", "draft_model": None}


def settings_of(folder: Path, kind: str, family: str, variant: str) -> dict[str, Any]:
    """Returns the settings of a model with a head."""
    name = f"{kind}-{family}-{variant}-0"
    if kind == "mtp":
        path = folder / name
        return {"model": str(path if path.is_dir() else write_mtp(folder, family, variant))} | {
            "speculation": "mtp"
        }
    target, path = checkpoint(family, variant), folder / name
    if not path.is_dir():
        reads = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
        write_eagle3(path, target, **reads)
    return {"model": str(target), "speculation": "eagle3", "draft_model": str(path)}


def check(llm: LLM, plain: LLM, most: int = 30, count: int = 14) -> int:
    """Compares answers with those without drafts; returns the number of drafted tokens."""
    prompts, params = requests(300, count, most)
    expected = results(plain.generate(prompts, params, use_tqdm=False))
    drafts = always_draft(llm)
    assert results(llm.generate(prompts, params, use_tqdm=False)) == expected
    assert llm.stats().pages_in_use == 0
    assert not drafts._texts
    drafts._kv.check_integrity()
    return llm.stats().num_draft_tokens
