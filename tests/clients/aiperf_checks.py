"""AIPerf: a profile of parallel streams, whose token counts are those of the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, ROOT, main

# An answer without text is an error to AIPerf, so what the model says is not left to chance.
OPTIONS = """--endpoint-type chat --streaming --concurrency 2 --request-count 8 --isl 32 --osl 8
    --random-seed 1 --extra-inputs temperature:0
    --extra-inputs ignore_eos:true --ui none --no-gpu-telemetry --use-server-token-count"""


def check_a_profile() -> None:
    # It looks for the tokenizer's files on a hub if it is told to be offline.
    environment = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(Path(sys.executable).with_name("aiperf")), "profile"),
            *("--model-names", MODEL, "--url", ROOT, *OPTIONS.split()),
            *("--tokenizer", os.environ["CLIENTS_TOKENIZER"], "--artifact-dir", folder),
        ]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
        result = json.loads(Path(folder, "profile_export_aiperf.json").read_text())
        metrics = Path(folder, "server_metrics_export.json").read_text()
    told = (
        f"{result.get('error_request_count')} {result.get('error_summary')}\n{done.stdout[-1500:]}"
    )
    assert result.get("request_count", {}).get("avg") == 8, told
    assert not result.get("error_request_count"), told
    assert result["output_sequence_length"]["avg"] == 8
    assert result["input_sequence_length"]["avg"] > 32
    assert "vllm:" in metrics or "mergestep:" in metrics  # it has found /metrics


if __name__ == "__main__":
    main()
