"""The `serve` command: run a server, chat in the terminal, measure, say the version.

Heavy imports happen inside the commands, so that `serve --help` is quick.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench import cli as bench_cli
from bench.plan import cli as plan_cli
from serve import cli_options as opt
from serve import run_command
from serve.cli_reporting import reported, set_up_logging
from serve.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from serve.engine import Engine

app = typer.Typer(
    name="serve",
    help="A lightweight LLM server: OpenAI-compatible HTTP, chat, load tests and plans.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


app.command("run", help=run_command.HELP, epilog=run_command.EXAMPLES)(run_command.run_signed)


@app.command()
def node(
    url: opt.NodeUrl = "tcp://127.0.0.1:7000",
    kv_cache_bytes: opt.NodeKVBytes = None,
    memory_node_key_file: opt.NodeKey = None,
    threads: opt.ComputeThreads = None,
    drain_s: Annotated[float, typer.Option(help="How long a stop waits for engines.")] = 30.0,
    max_engines: Annotated[int, typer.Option(help="Engines at once.")] = 64,
    log_level: opt.LogLevel = "info",
) -> None:
    """Hold K/V of engines elsewhere, and attend over it (`serve run --memory-nodes`)."""
    from serve import node_cli

    set_up_logging(log_level)
    with reported():
        node_cli.serve_node(
            url, kv_cache_bytes, memory_node_key_file, threads, drain_s, max_engines
        )


@app.command()
def chat(
    model: Annotated[
        str | None,
        typer.Argument(help="A Hugging Face directory; with --url, the model's name there."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Talk to this server.")] = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Say this, print the answer, leave.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
    dtype: opt.DType = "auto",
    max_model_len: opt.MaxModelLen = None,
    compute_threads: opt.ComputeThreads = None,
    backend: opt.Backend = "auto",
) -> None:
    """Chat in the terminal, with a model in this process or a server."""
    from serve import terminal_chat

    set_up_logging("warning")
    with reported():
        speaker: terminal_chat.Speaker
        if url is not None:
            speaker = terminal_chat.ServerSpeaker(
                url, model=model, max_tokens=max_tokens, temperature=temperature
            )
        else:
            engine = _engine(
                model,
                dtype=dtype,
                max_model_len=max_model_len,
                compute_threads=compute_threads,
                backend=backend,
            )
            speaker = terminal_chat.EngineSpeaker(
                engine, max_tokens=max_tokens, temperature=temperature
            )
        terminal_chat.chat(speaker, system=system, message=message)


app.command("bench", cls=bench_cli.Bench)(bench_cli.online)
app.command("plan")(plan_cli.plan)


@app.command("eval")
def evaluate(
    model: opt.Model = DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="A text file; the built-in held-out text by default.")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="DTYPE or DTYPE/KV_DTYPE; repeat it. The first is the reference."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="How much of the text is read.")] = 4096,
    window: Annotated[int, typer.Option(help="Tokens read from an empty context.")] = 512,
    weight_group: opt.WeightGroup = 64,
    kv_group: opt.KVGroup = 64,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the table here.")] = None,
) -> None:
    """Compare precisions: perplexity, KL divergence and greedy agreement on a text."""
    from serve import evaluate_cli

    set_up_logging("warning")
    with reported():
        evaluate_cli.run(
            model,
            text,
            precision,
            max_tokens=max_tokens,
            window=window,
            weight_group=weight_group,
            kv_group=kv_group,
            json_file=json_file,
        )


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"mergestep {_version()}")


def main() -> None:
    """The console entry point."""
    app()


def _version() -> str:
    try:
        return importlib.metadata.version("mergestep")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: a source tree)"


def _engine(model: str | None, *, progress: bool = False, **settings: Any) -> Engine:
    from serve.engine import Engine

    return Engine(model, progress=progress, **settings)
