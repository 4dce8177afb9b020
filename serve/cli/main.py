"""The `serve` command: run a server, chat in the terminal, measure, plan, list models.

Heavy imports happen inside the commands, so that `serve --help` is quick.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli import main as bench_cli
from bench.cli import plan as plan_cli
from serve.cli import examples as cli_examples
from serve.cli import options as opt
from serve.cli import run as run_command
from serve.cli.client_key import read_client_key
from serve.cli.model_files import find_model
from serve.cli.reporting import reported, set_up_logging
from serve.cli.run_options import SERVER
from serve.config import DEFAULT_MODEL
from serve.errors import ConfigError

if TYPE_CHECKING:
    from serve.engine.engine import Engine

app = typer.Typer(
    name="serve",
    help="A lightweight LLM server: OpenAI-compatible HTTP, chat, load tests and plans.",
    epilog=cli_examples.ALL,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def top(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and leave.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """What stands before a command."""


app.command("run", help=run_command.HELP, epilog=cli_examples.RUN)(run_command.run_signed)


@app.command(epilog=cli_examples.NODE)
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
    from serve.cli import node as node_cli

    set_up_logging(log_level)
    with reported():
        node_cli.serve_node(
            url, kv_cache_bytes, memory_node_key_file, threads, drain_s, max_engines
        )


@app.command(epilog=cli_examples.CHAT)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's directory or its name in the Hugging Face cache; with --url, the"
            " model's name there."
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to this server.", rich_help_panel=SERVER)
    ] = None,
    api_key_file: opt.ClientKeyFile = None,
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
    given = {"temperature": temperature, "max_tokens": max_tokens}
    options = {name: value for name, value in given.items() if value is not None}
    engine = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "compute_threads": compute_threads,
        "backend": backend,
    }
    set_up_logging("warning")
    with reported():
        from serve.cli import chat as terminal_chat
        from serve.cli.chat_speakers import EngineSpeaker, ServerSpeaker, Speaker

        speaker: Speaker
        if url is not None:
            key = read_client_key(api_key_file)
            speaker = ServerSpeaker(url, options, model=model, api_key=key)
        else:
            speaker = EngineSpeaker(_engine(model, **engine), options)
        terminal_chat.chat(speaker, system=system, message=message)


app.command("bench", cls=bench_cli.Bench, epilog=cli_examples.BENCH)(bench_cli.online)
app.command("plan", epilog=cli_examples.PLAN)(plan_cli.plan)


@app.command(epilog=cli_examples.MODELS)
def models(
    where: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH|URL]...",
            help="Folders of models, or one server.",
            show_default="the embedded model and the Hugging Face cache",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="What this server serves.", rich_help_panel=SERVER)
    ] = None,
    api_key_file: opt.ClientKeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models that can be served here, or those of a server. Nothing is downloaded."""
    set_up_logging("warning")
    with reported():
        from serve.cli import models as models_cli

        places = list(where or ())
        if url is None and len(places) == 1 and "://" in places[0]:
            url = places.pop()
        if url is None:
            models_cli.show_local([Path(place) for place in places], as_json=as_json)
            return
        if places:
            raise ConfigError("either folders or the URL of one server")
        import asyncio

        found = asyncio.run(models_cli.fetch_models(url, read_client_key(api_key_file)))
        models_cli.show_served(found, as_json=as_json)


@app.command("eval", epilog=cli_examples.EVAL)
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
    from serve.cli import eval as evaluate_cli

    set_up_logging("warning")
    with reported():
        evaluate_cli.run(
            find_model(model).model,
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


def _engine(model: str | None, **settings: Any) -> Engine:
    from serve.engine.engine import Engine

    if model is None:
        return Engine(**settings)
    found = find_model(model)
    return Engine(found.model, served_model_name=found.name, **settings)
