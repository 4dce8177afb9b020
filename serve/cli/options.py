"""Options that several commands share: those of `serve run`, and some of their own.

run_options.py holds the help of the former; `serve run` itself makes its options from there.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from serve.cli.client_key import API_KEY_ENV
from serve.cli.config_file import parse_size
from serve.cli.run_options import ENGINE_OPTIONS, PROCESS_OPTIONS, SERVER


def of_run(name: str, **more: Any) -> Any:
    """The same option as `serve run` has, for another command: without its variable."""
    option = (ENGINE_OPTIONS | PROCESS_OPTIONS)[name]
    more.setdefault("rich_help_panel", option.panel)
    if option.is_size:
        more |= {"parser": parse_size, "metavar": "SIZE"}
    elif option.metavar:
        more["metavar"] = option.metavar
    flag = "--" + name.replace("_", "-")
    names = (flag, *option.flags) if option.flags else ()
    return typer.Option(*names, help=option.help, autocompletion=completion(option.choices), **more)


def completion(choices: tuple[str, ...]) -> Any:
    """For the shell; None where there is nothing to choose from."""
    if not choices:
        return None

    def begun(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return begun


_a_size: Any = functools.partial(typer.Option, parser=parse_size, metavar="SIZE")

# ---- of several commands

Model = Annotated[
    str,
    typer.Argument(
        help=ENGINE_OPTIONS["model"].help, metavar="MODEL", show_default="the embedded model"
    ),
]
LoadFormat = Annotated[str, of_run("load_format")]
DType = Annotated[str, of_run("dtype")]
WeightGroup = Annotated[int, of_run("weight_group")]
KVDType = Annotated[str, of_run("kv_dtype")]
KVGroup = Annotated[int, of_run("kv_group")]
MaxModelLen = Annotated[int | None, of_run("max_model_len")]
ComputeThreads = Annotated[int | None, of_run("compute_threads")]
Backend = Annotated[str, of_run("backend")]
LogLevel = Annotated[str, of_run("log_level")]
MaxNumSeqs = Annotated[int, of_run("max_num_seqs")]
MaxNumBatchedTokens = Annotated[int | None, of_run("max_num_batched_tokens")]
InterTokenSLO = Annotated[float | None, of_run("inter_token_slo_ms")]
KVCacheBytes = Annotated[int | None, of_run("kv_cache_bytes")]
UsePrefixCache = Annotated[bool, of_run("prefix_cache")]
MemoryPolicy = Annotated[str, of_run("memory_policy")]
Order = Annotated[str, of_run("order")]
TTFTSLO = Annotated[float | None, of_run("ttft_slo")]
NodeKey = Annotated[
    str | None,
    of_run(
        "memory_node_key_file",
        envvar=["MERGESTEP_MEMORY_NODE_KEY_FILE", "MERGESTEP_NODE_KEY_FILE"],
    ),
]
ClientKeyFile = Annotated[
    Path | None,
    typer.Option(
        help=f"A file with the key of --url; {API_KEY_ENV} of the environment by default.",
        show_default=False,
        rich_help_panel=SERVER,
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="A few seconds, and no targets.")]

# ---- of `serve node`

NodeUrl = Annotated[
    str, typer.Argument(help="Where: tcp://HOST:PORT, shm:///PATH or rdma://HOST:PORT.")
]
NodeKVBytes = Annotated[
    int | None, _a_size(help="K/V of all engines, such as 8GiB; by default 80 % of what is free.")
]
