"""Runs a model whose files are truncated, overwritten and deleted. It runs in a process of its
own, since reading file pages that are gone would kill it."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from serve import LLM, SamplingParams

folder = Path(tempfile.mkdtemp())
for source in sys.argv[1:]:
    for dtype in ("float32", "int8"):
        path = Path(shutil.copytree(source, folder / "model"))
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        llm = LLM(str(path), dtype=dtype)
        before = llm.generate([[5, 6, 7], [300, 9]], params)
        for file in path.glob("*.safetensors"):
            size = file.stat().st_size
            os.truncate(file, 0)
            os.truncate(file, size)  # the file has zeros now
            os.truncate(file, 0)
        shutil.rmtree(path)
        after = llm.generate([[5, 6, 7], [300, 9]], params)
        for one, other in zip(before, after, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids, (source, dtype)
        llm.shutdown()
shutil.rmtree(folder)
