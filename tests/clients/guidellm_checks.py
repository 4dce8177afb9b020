"""GuideLLM: a benchmark at a rate, with made-up prompts.

It imports torch for its loader of data. CLIENTS_TORCH is the folder of the project's own torch, so
that it need not be installed again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(os.environ["CLIENTS_TORCH"])  # here, since its worker processes run this again

from checks import MODEL, ROOT, main


def benchmark(*options: str) -> list[dict[str, Any]]:
    """Returns the benchmarks of its report."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, __file__, "--guidellm", "run"),
            *("--backend", f"kind=openai_http,target={ROOT}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--tokenizer", f"kind=huggingface_auto,model={os.environ['CLIENTS_TOKENIZER']}"),
            *("--output", "kind=json,path=report.json"),
            *("--disable-console", *options),
        ]
        limits = {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}
        done = subprocess.run(
            command, cwd=folder, env=os.environ | limits, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
        report = json.loads(Path(folder, "report.json").read_text())
    return list(report["benchmarks"])


def check_a_benchmark_at_a_rate() -> None:
    options = "--profile", "kind=constant,rate=8", "--constraint", "kind=max_requests,count=8"
    (result,) = benchmark(*options)
    assert result["metrics"]["request_totals"]["successful"] == 8, result["metrics"]
    assert len(result["requests"]["successful"]) == 8
    for request in result["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] == 8, request
        assert request["input_metrics"]["text_tokens"] >= 32, request
        assert MODEL in json.dumps(request)


if __name__ == "__main__":
    if "--guidellm" in sys.argv:
        from guidellm.__main__ import cli

        sys.argv.remove("--guidellm")
        cli()
    else:
        main()
