"""What stands below the options of each command's help."""

from __future__ import annotations

EXIT_CODES = (
    "[bold]Exit code[/bold] 0: done; 1: it failed on the way; 2: what was asked for cannot be."
)
_EXAMPLES = "[bold]Examples[/bold]"


def _below(*examples: str | tuple[str, str], exit_codes: str = EXIT_CODES) -> str:
    """examples: commands, some with what they do. Blank lines are how typer separates lines."""
    lines = [
        line if isinstance(line, str) else f"{line[0]}  [dim]{line[1]}[/dim]" for line in examples
    ]
    return "\n\n".join([_EXAMPLES, *lines, exit_codes])


ALL = _below(
    ("serve run", "a server for the embedded model, at http://127.0.0.1:8000"),
    ("serve run ./Qwen3-0.6B", "or for a Hugging Face directory"),
    ("serve models", "what else there is on this machine"),
    ("serve chat --url http://127.0.0.1:8000", "talk to it"),
    ("serve bench --url http://127.0.0.1:8000 --qps 4", "measure it"),
)
RUN = _below(
    ("serve run", "the embedded model, at http://127.0.0.1:8000"),
    "serve run ./Qwen3-0.6B --port 9000 --max-model-len 4096",
    "serve run Qwen/Qwen2.5-0.5B-Instruct --dtype int8 --kv-cache-bytes 2GiB",
    "MERGESTEP_PORT=9000 serve run --config server.toml",
    ("serve run --print-config > server.toml", "all settings, to change and feed back"),
    "[bold]Settings[/bold] come from flags, else the environment, else the file, else defaults.",
    exit_codes="[bold]Exit code[/bold] 0: stopped by a signal; 1: it failed; 2: what was asked for"
    " cannot be.",
)
NODE = _below(
    "serve node tcp://10.0.0.2:7000 --kv-cache-bytes 64GiB --memory-node-key-file key",
    ("serve run --memory-nodes tcp://10.0.0.2:7000 --memory-node-key-file key", "uses it"),
)
CHAT = _below(
    ("serve chat", "with the embedded model, in this process"),
    'serve chat ./Qwen3-0.6B --system "Be brief."',
    "serve chat --url http://127.0.0.1:8000 --api-key-file key",
    ('serve chat -m "What is 3 plus 4?"', "one answer"),
    'git diff | serve chat --system "Review this."',
)
BENCH = _below(
    ("serve bench --qps 4 --html run.html", "a load on the embedded model, and a report"),
    "serve bench --url http://127.0.0.1:8000 --qps 1:8:4 --requests 200",
    ("serve bench --find-max-qps --slo ttft=500,tpot=50", "the highest rate that keeps it"),
    ("serve bench latency --help", "one of the measurements of their own"),
    exit_codes=EXIT_CODES[:-1] + "; 3: the run is not valid.",
)
PLAN = _below(
    ("serve plan llama-3.1-8b --tpot 50 --usd-per-hour 5", "which machine"),
    ("serve plan qwen3-8b --machine l4", "what one can do"),
    exit_codes=EXIT_CODES[:-1] + "; 3: no machine serves what is wanted.",
)
EVAL = _below(
    ("serve eval", "the embedded model on its held-out text"),
    "serve eval DIR --precision bfloat16 --precision int8 --precision bfloat16/int8",
)
MODELS = _below(
    ("serve models", "the embedded model and the Hugging Face cache"),
    ("serve models ./models --json", "folders, for programs"),
    "serve models http://127.0.0.1:8000 --api-key-file key",
    ("serve run Qwen/Qwen2.5-0.5B-Instruct", "a name of the list"),
)
