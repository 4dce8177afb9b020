"""The examples and exit codes below the options in each command's help."""

from __future__ import annotations

_CODES = (
    "[bold]Exit code[/bold] 0: success; 1: the command failed; 2: an option or setting is wrong;"
)
EXIT_CODES = f"{_CODES} 130: Ctrl-C."
_EXAMPLES = "[bold]Examples[/bold]"


def _below(*examples: str | tuple[str, str], exit_codes: str = EXIT_CODES) -> str:
    """examples: commands, some with a description. typer separates lines by blank lines."""
    lines = [
        line if isinstance(line, str) else f"{line[0]}  [dim]{line[1]}[/dim]" for line in examples
    ]
    return "\n\n".join([_EXAMPLES, *lines, exit_codes])


ALL = _below(
    ("serve run", "a server for the embedded model, at http://127.0.0.1:8000"),
    ("serve run ./Qwen3-0.6B", "a server for a Hugging Face directory"),
    ("serve run Qwen/Qwen2.5-0.5B-Instruct", "a server for a model that is downloaded first"),
    ("serve models", "the models on this machine"),
    ("serve chat --url http://127.0.0.1:8000", "chat with it"),
    ("serve bench --url http://127.0.0.1:8000 --qps 4", "measure it"),
    exit_codes=f"{_CODES} 3: `serve bench`: the run is not valid, `serve plan`: no machine"
    " suffices; 130: Ctrl-C.",
)
RUN = _below(
    ("serve run", "the embedded model, at http://127.0.0.1:8000"),
    "serve run ./Qwen3-0.6B --port 9000 --max-model-len 4096",
    ("serve run ./Qwen3-0.6B ./Llama-3.2-1B", "several models, each loaded when it is asked for"),
    "serve run Qwen/Qwen2.5-0.5B-Instruct --dtype int8 --kv-cache-bytes 2GiB",
    ("serve run Qwen/Qwen2.5-0.5B-Instruct --revision main", "a branch, tag or commit"),
    "MERGESTEP_PORT=9000 serve run --config server.toml",
    ("serve run --print-config > server.toml", "all settings, to edit and use with --config"),
    "[bold]Settings[/bold] come from flags, else the environment, else the file, else defaults.",
    exit_codes="[bold]Exit code[/bold] 0: stopped by a signal; 1: the server failed; 2: an"
    " option or setting is wrong; 130, 143: Ctrl-C, SIGTERM while the model loads.",
)
CLUSTER = _below(
    ("serve cluster ./Qwen3-8B --pp 2 --dry-run", "where Ray would put two stages"),
    "serve cluster ./Qwen3-8B --tp 2 --pp 2 --cpus-per-rank 8 --host 0.0.0.0 --api-key-file keys",
    ("serve cluster --pp 2 --ray-address local", "on this machine alone"),
    exit_codes="[bold]Exit code[/bold] 0: stopped by a signal; 1: the model could not be started;"
    " 2: an option or setting is wrong; 130, 143: Ctrl-C, SIGTERM while the model loads.",
)
FRONT = _below(
    "serve run ./Qwen3-8B --port 8001 &  serve run ./Qwen3-8B --port 8002 &",
    "serve front http://127.0.0.1:8001 http://127.0.0.1:8002 --port 8000",
)
NODE = _below(
    "serve node tcp://10.0.0.2:7000 --kv-cache-bytes 64GiB --memory-node-key-file key",
    (
        "serve run --memory-nodes tcp://10.0.0.2:7000 --memory-node-key-file key",
        "an engine that uses it",
    ),
)
CHAT = _below(
    ("serve chat", "chats with the embedded model in this process"),
    'serve chat ./Qwen3-0.6B --system "Be brief."',
    "serve chat --url http://127.0.0.1:8000 --api-key-file key",
    ('serve chat -m "What is 3 plus 4?"', "prints one answer"),
    'git diff | serve chat --system "Review this."',
)
BENCH = _below(
    ("serve bench --qps 4 --html run.html", "a load on the embedded model, with a report"),
    "serve bench --url http://127.0.0.1:8000 --qps 1:8:4 --requests 200",
    ("serve bench --find-max-qps --slo ttft=500,tpot=50", "the highest rate that meets the SLO"),
    ("serve bench latency --help", "a measurement with options of its own"),
    exit_codes=f"{_CODES} 3: the run is not valid; 130: Ctrl-C.",
)
PLAN = _below(
    ("serve plan llama-3.1-8b --tpot 50 --usd-per-hour 5", "the machines that suffice"),
    ("serve plan qwen3-8b --machine l4", "what one machine can do"),
    exit_codes=f"{_CODES} 3: no machine suffices; 130: Ctrl-C.",
)
EVAL = _below(
    ("serve eval", "the embedded model on its held-out text"),
    "serve eval DIR --precision bfloat16 --precision int8 --precision bfloat16/int8",
    ("serve eval --kv-policy quest --kv-policy h2o:budget=25%", "what K/V policies cost"),
)
PULL = _below(
    "serve pull Qwen/Qwen2.5-0.5B-Instruct",
    ("serve pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M", "one quantization of GGUF files"),
    ("HF_TOKEN=... serve pull meta-llama/Llama-3.2-1B-Instruct", "a gated model"),
    ("HF_HOME=/data/huggingface serve pull Qwen/Qwen3-8B", "to another disk"),
)
QUANTIZE = _below(
    ("serve quantize ./Qwen3-0.6B ./Qwen3-0.6B-int4 --text chats.txt", "writes int4 weights"),
    ("serve eval ./Qwen3-0.6B --precision bfloat16 --precision auto@./Qwen3-0.6B-int4", "compares"),
)
MODELS = _below(
    ("serve models", "the embedded model and the Hugging Face cache"),
    ("serve models ./models --json", "the models of a directory as JSON"),
    "serve models http://127.0.0.1:8000 --api-key-file key",
    ("serve run Qwen/Qwen2.5-0.5B-Instruct", "runs a model of the list"),
)
