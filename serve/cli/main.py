"""The `serve` command and its commands.

Heavy modules are imported inside the commands, so that `serve --help` is fast.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer
from typer.core import TyperCommand

from serve.cli import examples, options
from serve.cli.client_key import read_client_key
from serve.cli.cluster import CLUSTER_HELP, cluster_command
from serve.cli.model_files import find_model, pull_model
from serve.cli.reporting import reported, set_up_logging
from serve.cli.run import RUN_HELP, run_command
from serve.cli.setting_panels import SERVER
from serve.cli.suggestions import SuggestingGroup
from serve.config import DEFAULT_MODEL, EngineSettings
from serve.errors import ConfigError

if TYPE_CHECKING:
    from serve.engine.engine import Engine

app = typer.Typer(
    name="serve",
    cls=SuggestingGroup,
    help="A lightweight LLM server: OpenAI-compatible HTTP, chat, load tests and plans.",
    epilog=examples.ALL,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        version()
        raise typer.Exit


@app.callback()
def top(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Declares the options before a command."""


app.command("run", help=RUN_HELP, epilog=examples.RUN)(run_command)
app.command("cluster", help=CLUSTER_HELP, epilog=examples.CLUSTER)(cluster_command)


@app.command(epilog=examples.NODE)
def node(
    url: options.NodeUrl = "tcp://127.0.0.1:7000",
    kv_cache_bytes: options.NodeKVBytes = None,
    memory_node_key_file: options.NodeKey = None,
    memory_node_encryption: options.NodeEncryption = "auto",
    threads: options.ComputeThreads = None,
    drain_s: Annotated[float, typer.Option(help="How long a shutdown waits for engines.")] = 30.0,
    max_engines: Annotated[int, typer.Option(help="Most engines at once.")] = 64,
    log_level: options.LogLevel = "info",
) -> None:
    """Hold K/V of remote engines and compute attention over it (`serve run --memory-nodes`)."""
    from serve.cli.node import node_config, serve_node

    set_up_logging(log_level)
    with reported():
        config = node_config(url, memory_node_key_file, memory_node_encryption)
        serve_node(config, kv_cache_bytes, threads, drain_s, max_engines)


@app.command(epilog=examples.FRONT)
def front(
    replicas: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Servers of the same model.")
    ],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8000,
    tls_cert: Annotated[str | None, typer.Option(help="A file with a certificate chain.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="The file of its private key.")] = None,
    lost_after_s: Annotated[
        float, typer.Option(help="A server that does not answer for so long is lost.")
    ] = 3.0,
    wait_s: Annotated[
        float, typer.Option(help="How long a call waits for a server that is ready.")
    ] = 60.0,
    routing: Annotated[
        str, typer.Option(help="Which server is next: prefix, least-busy or round-robin.")
    ] = "prefix",
    prefill_apart: Annotated[
        str,
        typer.Option(
            help="auto: servers that are K/V peers share calls where that pays, one computing"
            " the prompt, one the answer; off: never."
        ),
    ] = "auto",
    hop_key_file: Annotated[
        str | None,
        typer.Option(help="A secret that the servers have, too; see their --hop-key-file."),
    ] = None,
    drain_s: Annotated[float, typer.Option(help="How long a shutdown waits for calls.")] = 30.0,
    log_level: options.LogLevel = "info",
) -> None:
    """Stand before equal servers: a stream whose server dies or stops goes on at another one.

    No client notices, and no token changes.
    """
    from serve.cluster.front.command import run_front
    from serve.cluster.front.front import FrontSettings
    from serve.http.edge.settings import HttpSettings

    set_up_logging(log_level)
    with reported():
        urls = tuple(dict.fromkeys(replicas))
        settings = FrontSettings(urls, lost_after_s, wait_s, routing, prefill_apart)
        http = HttpSettings(
            host=host,
            port=port,
            hop_key_file=hop_key_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            drain_s=drain_s,
        )
        run_front(settings, http)


@app.command(epilog=examples.CHAT)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model's directory or its name on the hub, as for `serve run`; with --url, its"
            " name on the server."
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Chat with this server.", rich_help_panel=SERVER)
    ] = None,
    api_key_file: options.ClientKeyFile = None,
    message: Annotated[
        str | None,
        typer.Option("--message", "-m", help="Send this message, print the answer and exit."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of sampling; 0 is greedy.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    revision: options.Revision = None,
    tokenizer: options.TokenizerDir = None,
    dtype: options.DType = "auto",
    max_model_len: options.MaxModelLen = None,
    compute_threads: options.ComputeThreads = None,
    backend: options.Backend = "auto",
) -> None:
    """Chat in the terminal, with a model in this process or a server."""
    given = {"temperature": temperature, "max_tokens": max_tokens}
    sampling = {name: value for name, value in given.items() if value is not None}
    engine: EngineSettings = {
        "tokenizer": tokenizer,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "compute_threads": compute_threads,
        "backend": backend,
    }
    set_up_logging("warning")
    with reported():
        from serve.cli.chat import run_chat
        from serve.cli.chat_speakers import EngineSpeaker, ServerSpeaker, Speaker

        speaker: Speaker
        if url is not None:
            key = read_client_key(api_key_file)
            speaker = ServerSpeaker(url, sampling, model=model, api_key=key)
        else:
            speaker = EngineSpeaker(_engine(model, revision, **engine), sampling)
        run_chat(speaker, system=system, message=message)


class BenchCommand(TyperCommand):
    """A command of `bench`, which is imported when the command is chosen.

    The function that it decorates gives only its name and its line in `serve --help`.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        from bench.cli.main import command

        return command(self.name).make_context(info_name, args, parent, **extra)


@app.command(cls=BenchCommand)
def bench() -> None:
    """Measure a server, an engine in this process or a simulated engine under load."""


@app.command(cls=BenchCommand)
def plan() -> None:
    """Predict how fast MODEL runs on machines, and compare their costs."""


@app.command(epilog=examples.PULL)
def pull(
    model: Annotated[
        str, typer.Argument(metavar="NAME", help="ORG/NAME, ORG/NAME:QUANT or ORG/NAME:FILE.gguf.")
    ],
    revision: options.Revision = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no progress, only where the model is.")
    ] = False,
) -> None:
    """Download a model by its name on the Hugging Face hub, and print where it is.

    Only the files that are needed are fetched, and checked. After an interruption the same command
    goes on where it was.
    """
    set_up_logging("warning")
    with reported():
        typer.echo(pull_model(model, revision=revision, is_quiet=quiet))


@app.command(epilog=examples.MODELS)
def models(
    where: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH|URL]...",
            help="Directories of models, or the URL of a server.",
            show_default="the embedded model and the Hugging Face cache",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="List the models of this server.", rich_help_panel=SERVER)
    ] = None,
    api_key_file: options.ClientKeyFile = None,
    tokenizer: options.TokenizerDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models on this machine or on a server. Nothing is downloaded."""
    set_up_logging("warning")
    with reported():
        from serve.cli.models import fetch_models, show_local, show_served

        paths = list(where or ())
        if url is None and len(paths) == 1 and "://" in paths[0]:
            url = paths.pop()
        if url is None:
            show_local([Path(path) for path in paths], tokenizer, as_json=as_json)
            return
        if paths:
            raise ConfigError("name either directories or the URL of one server")
        import asyncio

        served = asyncio.run(fetch_models(url, read_client_key(api_key_file)))
        show_served(served, as_json=as_json)


# the options of `serve eval` that are for one of its two measurements
_OF_PRECISIONS = (
    *("revision", "text", "precision", "max_tokens", "window", "weight_group", "kv_group"),
    "tokenizer",
)
_OF_POLICIES = "context", "exercises", "seed", "reference", "png_file"


@app.command("eval", epilog=examples.EVAL)
def evaluate(
    command: typer.Context,
    model: options.Model = DEFAULT_MODEL,
    revision: options.Revision = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file; by default the built-in held-out text.")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="DTYPE or DTYPE/KV_DTYPE, with @MODEL those of other files of the model;"
            " repeatable. The first one is the reference."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the text that are read.")] = 4096,
    window: Annotated[
        int, typer.Option(help="Tokens of a window, each read from an empty context.")
    ] = 512,
    weight_group: options.WeightGroup = 64,
    kv_group: options.KVGroup = 64,
    tokenizer: options.TokenizerDir = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the table to this file.")
    ] = None,
    kv_policy: options.KVPolicies = None,
    context: options.PolicyContext = 4096,
    exercises: options.PolicyExercises = 16,
    seed: options.PolicySeed = 0,
    reference: options.PolicyReference = False,
    png_file: options.PolicyPicture = None,
) -> None:
    """Compare precisions of a model on a text, or what K/V policies cost on long-range tasks."""
    set_up_logging("warning")
    with reported():
        if kv_policy:
            options.refuse_given(command, _OF_PRECISIONS, "cannot be used with --kv-policy")
            from bench.cli.kv_policies import run_kv_policies

            run_kv_policies(
                model,
                kv_policy,
                context=context,
                exercises=exercises,
                seed=seed,
                on_reference=reference,
                json_file=json_file,
                png_file=png_file,
            )
            return
        options.refuse_given(command, _OF_POLICIES, "needs --kv-policy")
        from serve.cli.eval import run_eval

        run_eval(
            find_model(model, revision=revision).model,
            text,
            precision,
            max_tokens=max_tokens,
            window=window,
            weight_group=weight_group,
            kv_group=kv_group,
            tokenizer=tokenizer,
            json_file=json_file,
        )


@app.command(epilog=examples.QUANTIZE)
def quantize(
    model: Annotated[str, typer.Argument(help="The model, in 16 or 32 bits.", metavar="MODEL")],
    output: Annotated[Path, typer.Argument(help="The directory to write.", metavar="DIR")],
    text: Annotated[Path, typer.Option(help="A text like those that the model will read.")],
    revision: options.Revision = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the text that are read.")] = 16384,
    window: Annotated[
        int, typer.Option(help="Tokens of a window, each read from an empty context.")
    ] = 512,
    weight_group: options.WeightGroup = 64,
) -> None:
    """Write a model with int4 weights whose rounding errors are compensated, as GPTQ does it."""
    from serve.cli.eval import run_quantize

    set_up_logging("warning")
    with reported():
        run_quantize(
            find_model(model, revision=revision).model,
            output,
            text,
            max_tokens=max_tokens,
            window=window,
            weight_group=weight_group,
        )


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"mergestep {_version()}")


def main() -> None:
    """Runs the console entry point."""
    app()


def _version() -> str:
    try:
        return importlib.metadata.version("mergestep")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: a source tree)"


def _engine(model: str | None, revision: str | None, **settings: Unpack[EngineSettings]) -> Engine:
    from serve.engine.engine import Engine

    if model is None and revision is None:
        return Engine(**settings)
    location = find_model(model or DEFAULT_MODEL, revision=revision)
    settings["served_model_name"] = location.name
    return Engine(location.model, **settings)
