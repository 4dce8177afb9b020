"""Which tokens end an answer, and what generation_config.json sets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from serve import LLM
from serve.models import read_generation_defaults
from tests.support.engine.checkpoints import checkpoint, edit_json
from tests.support.engine.engine_rig import params


def answer(path: Path, prompt: list[int], *, ignore_eos: bool = False) -> list[int]:
    with LLM(str(path), dtype="float32") as llm:
        (output,) = llm.generate(
            {"prompt_token_ids": prompt}, params(ignore_eos=ignore_eos), use_tqdm=False
        )
        assert output.outputs[0].finish_reason in ("stop", "length")
        return list(output.outputs[0].token_ids)


def test_every_end_token_ends_an_answer(tmp_path: Path) -> None:
    """Both of generation_config.json, and the tokenizer's, which differs from config.json's."""
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    prompt = [5, 9, 17]
    whole = answer(path, prompt, ignore_eos=True)
    assert len(whole) == 12
    state = json.loads((path / "tokenizer.json").read_text())
    names = {index: token for token, index in state["model"]["vocab"].items()}
    ends = [token for token in dict.fromkeys(whole) if token in names][-3:]
    assert len(ends) == 3
    listed, other, named = ends
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [listed, other, 1]}))
    edit_json(path / "tokenizer_config.json", lambda values: values.update(eos_token=names[named]))
    for token in ends:
        start = whole.index(token)
        got = answer(path, [*prompt, *whole[:start]])
        assert got[-1] == token and len(got) == 1
    assert answer(path, prompt, ignore_eos=True) == whole


def test_defaults_of_generation_config(tmp_path: Path) -> None:
    """do_sample counts for nothing, as in vLLM: the temperature says whether to draw."""
    path = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    values = {
        "do_sample": False,
        "temperature": 0.6,
        "top_p": None,
        "top_k": 0,
        "repetition_penalty": 1.05,
        "eos_token_id": [106, 1],
        "pad_token_id": 0,
        "cache_implementation": "hybrid",
    }
    (path / "generation_config.json").write_text(json.dumps(values))
    assert read_generation_defaults(path) == {
        "eos_token_ids": (106, 1),
        "temperature": 0.6,
        "top_k": 0,
        "repetition_penalty": 1.05,
    }
