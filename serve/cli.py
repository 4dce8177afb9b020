"""The `serve` command: run a server, chat in the terminal, measure, say the version.

Heavy imports happen inside the commands, so that `serve --help` is quick.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from serve.config import DEFAULT_MODEL
from serve.errors import ConfigError, MergestepError, RequestError, plain

if TYPE_CHECKING:
    from serve.engine import Engine

app = typer.Typer(
    name="serve",
    help="A lightweight LLM server: OpenAI-compatible HTTP, chat and load tests.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
measurements = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
errors = Console(stderr=True)

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """ "2GiB", "512M", "1e3"-free plain bytes. K, M, G and T are powers of 1024 here."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 512M or 2GiB")
    return int(float(match[1]) * 1024 ** _POWERS[match[2].upper()])


Model = Annotated[
    str,
    typer.Argument(
        help="A Hugging Face directory.", metavar="MODEL", show_default="the embedded model"
    ),
]
DType = Annotated[str, typer.Option(help="auto, int8, int4, nf4, bfloat16 or float32.")]
WeightGroup = Annotated[
    int, typer.Option(help="Inputs that share a scale in int4 and nf4: 32, 64 or 128.")
]
KVDType = Annotated[str, typer.Option(help="K/V: auto, int8, bfloat16 or float32.")]
KVGroup = Annotated[int, typer.Option(help="Values that share a scale in int8 K/V.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest sequence in tokens; the model's by default.")
]
ComputeThreads = Annotated[int | None, typer.Option(help="Cores that compute; all by default.")]
Backend = Annotated[str, typer.Option(help="Operator back end, or auto.")]
Seed = Annotated[int | None, typer.Option(help="Base seed of requests that bring none.")]
_a_size: Any = functools.partial(typer.Option, parser=parse_size, metavar="SIZE")
NodeKey = Annotated[
    str | None,
    typer.Option(
        envvar="MERGESTEP_NODE_KEY_FILE",
        help="A file with the secret that engines and memory nodes share (tcp and rdma).",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="A few seconds, and no targets.")]


@app.command()
def run(
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    drain_s: Annotated[float, typer.Option(help="How long a stop waits for requests.")] = 30.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    served_model_name: Annotated[
        str | None, typer.Option(help="The name clients use; the directory's by default.")
    ] = None,
    dtype: DType = "auto",
    weight_group: WeightGroup = 64,
    kv_dtype: KVDType = "auto",
    kv_group: KVGroup = 64,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 256,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Rows of one step.")] = None,
    max_chunk_tokens: Annotated[
        int | None, typer.Option(help="Most prompt rows of one sequence in a step.")
    ] = None,
    inter_token_slo_ms: Annotated[
        float | None,
        typer.Option(
            "--inter-token-slo",
            metavar="MS",
            help="Cut prompts so that streams wait for a token no longer than this.",
        ),
    ] = None,
    max_num_waiting: Annotated[int, typer.Option(help="Requests that may wait.")] = 4096,
    kv_cache_bytes: Annotated[
        int | None, _a_size(help="Most K/V memory, such as 2GiB; by default 40 % of what is free.")
    ] = None,
    kv_page_bytes: Annotated[
        int | None, _a_size(help="Unit of K/V memory, such as 64K; by default about 16 tokens.")
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option(help="Share K/V between requests that begin alike.")
    ] = True,
    kv_cache_dir: Annotated[
        str | None, typer.Option(help="K/V that memory has no room for goes here, and stays.")
    ] = None,
    kv_disk_bytes: Annotated[
        int | None, _a_size(help="Most that --kv-cache-dir holds of a model; by default 16GiB.")
    ] = None,
    memory_policy: Annotated[
        str, typer.Option(help="Admission: predicted, worst_case or prompt_only.")
    ] = "predicted",
    order: Annotated[str, typer.Option(help="Who is next: fcfs, priority, mlfq or fair.")] = "fcfs",
    ttft_slo: Annotated[
        float | None, typer.Option(help="Refuse whose first token would come after that many s.")
    ] = None,
    memory_nodes: Annotated[
        str,
        typer.Option(help="Memory nodes, with commas between: K/V and attention go there."),
    ] = "",
    memory_partition: Annotated[
        str, typer.Option(help="What each node gets: auto, head, request or sequence.")
    ] = "auto",
    memory_node_bytes: Annotated[
        int | None, _a_size(help="K/V on each memory node; by default all that is free there.")
    ] = None,
    memory_node_key_file: NodeKey = None,
    memory_prefill: Annotated[
        str, typer.Option(help="Who attends over a prompt in progress: local or remote.")
    ] = "local",
    memory_wire: Annotated[
        str, typer.Option(help="To memory nodes: auto, float32, bfloat16 or int8.")
    ] = "auto",
    tokenize_threads: Annotated[int, typer.Option(help="Threads that tokenize.")] = 2,
    compute_threads: ComputeThreads = None,
    backend: Backend = "auto",
    seed: Seed = None,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    settings = {
        name: value
        for name, value in locals().items()
        if name not in ("model", "host", "port", "drain_s", "log_level")
    }
    from serve import run_cli

    _set_up_logging(log_level)
    with _reported():
        run_cli.serve(_engine(model, progress=True, **settings), host, port, drain_s)


@app.command()
def node(
    url: Annotated[
        str,
        typer.Argument(help="Where: tcp://HOST:PORT, shm:///PATH or rdma://HOST:PORT."),
    ] = "tcp://127.0.0.1:7000",
    kv_cache_bytes: Annotated[
        int | None,
        _a_size(help="K/V of all engines, such as 8GiB; by default 80 % of what is free."),
    ] = None,
    memory_node_key_file: NodeKey = None,
    threads: Annotated[int | None, typer.Option(help="Cores that compute; all by default.")] = None,
    drain_s: Annotated[float, typer.Option(help="How long a stop waits for engines.")] = 30.0,
    max_engines: Annotated[int, typer.Option(help="Engines at once.")] = 64,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Hold K/V of engines elsewhere, and attend over it (`serve run --memory-nodes`)."""
    from serve import node_cli

    _set_up_logging(log_level)
    with _reported():
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
    dtype: DType = "auto",
    max_model_len: MaxModelLen = None,
    compute_threads: ComputeThreads = None,
    backend: Backend = "auto",
) -> None:
    """Chat in the terminal, with a model in this process or a server."""
    from serve import terminal_chat

    _set_up_logging("warning")
    with _reported():
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


class _Bench(TyperCommand):
    """A first word that names a measurement of its own gets its own options and help."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        group: Any = typer.main.get_command(measurements)
        own = group.commands.get(args[0]) if args else None
        if own is None:
            return super().make_context(info_name, args, parent, **extra)
        return own.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)


@app.command(cls=_Bench)
def bench(
    model: Model = DEFAULT_MODEL,
    qps: Annotated[str, typer.Option(help="Offered requests per second, or inf.")] = "1",
    url: Annotated[
        str | None, typer.Option(help="Measure this server; else an engine in this process.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="How many; 100 by default.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of load instead.")] = None,
    input_len: Annotated[int | None, typer.Option(help="Random prompts of this length.")] = None,
    output_len: Annotated[
        int | None, typer.Option(help="Tokens per answer: exact with --input-len, else at most.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0,
    warmup: Annotated[int, typer.Option(help="Requests before the measured ones.")] = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write settings, summary and every request.")
    ] = None,
    dtype: DType = "auto",
    max_model_len: MaxModelLen = None,
    compute_threads: ComputeThreads = None,
    backend: Backend = "auto",
) -> None:
    """Measure latency under an open-loop Poisson load.

    `serve bench ops` measures the kernels, `serve bench io` the disk; --help goes with each.
    """
    from bench import load
    from serve.evaluate_cli import check_writable

    _set_up_logging("warning")
    with _reported():
        if model in ("ops", "io"):  # a model directory of that name is ./ops
            raise ConfigError(f"options come after the name: `serve bench {model} [OPTIONS]`")
        plan = load.LoadPlan(
            qps=load.parse_qps(qps),
            num_requests=load.count_requests(load.parse_qps(qps), requests, duration),
            input_len=input_len,
            output_len=output_len,
            seed=seed,
            num_warmup=warmup,
        )
        if json_file is not None:
            check_writable(json_file)
        engine = None
        if url is None:
            engine = _engine(
                model,
                dtype=dtype,
                max_model_len=max_model_len,
                compute_threads=compute_threads,
                backend=backend,
            )
        is_valid = load.run_and_report(
            plan, url=url, model=model, engine=engine, json_file=json_file
        )
    if not is_valid:
        raise typer.Exit(3)


@measurements.command("ops")
def bench_ops(quick: Quick = False) -> None:
    """Measure the kernels, each against what the machine can do."""
    from bench import ops

    with _reported():
        _need_kernels("ops")
        ops.run_and_report(quick=quick)


@measurements.command("io")
def bench_io(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where; here by default.", show_default=False),
    ] = None,
    quick: Quick = False,
) -> None:
    """Measure the way to the disk below DIR, in a temporary folder."""
    from bench import io

    with _reported():
        _need_kernels("io")
        io.run_and_report(directory or Path.cwd(), quick=quick)


def _need_kernels(what: str) -> None:
    from ops import native

    if not native.is_available():
        raise MergestepError(f"`serve bench {what}` needs the native kernels, which are not built")


@app.command("eval")
def evaluate(
    model: Model = DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="A text file; the built-in held-out text by default.")
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="DTYPE or DTYPE/KV_DTYPE; repeat it. The first is the reference."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="How much of the text is read.")] = 4096,
    window: Annotated[int, typer.Option(help="Tokens read from an empty context.")] = 512,
    weight_group: WeightGroup = 64,
    kv_group: KVGroup = 64,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the table here.")] = None,
) -> None:
    """Compare precisions: perplexity, KL divergence and greedy agreement on a text."""
    from serve import evaluate_cli

    _set_up_logging("warning")
    with _reported():
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


def _set_up_logging(level: str) -> None:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise typer.BadParameter(f"no log level is called {level!r}", param_hint="--log-level")
    logging.basicConfig(
        level=number, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", force=True
    )


@contextmanager
def _reported() -> Iterator[None]:
    """Errors that the user can mend are one line, not a traceback. Exit code 2: what was asked
    for cannot be; 1: it failed on the way."""
    try:
        yield
    except (MergestepError, OSError) as exc:
        errors.print("[red]error[/red]: ", end="")
        errors.print(plain(exc), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(exc, ConfigError | RequestError) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
