"""Options that several commands share.

Those that `serve run` has too take their help from setting_help.py, as `serve run` does.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from serve.cli.client_key import API_KEY_ENV
from serve.cli.config_file import parse_size
from serve.cli.setting_help import ENGINE_OPTIONS, PROCESS_OPTIONS
from serve.cli.setting_panels import SERVER
from serve.errors import ConfigError


def run_option(name: str, **more: Any) -> Any:
    """Returns an option of `serve run` for another command, without its environment variable."""
    option = (ENGINE_OPTIONS | PROCESS_OPTIONS)[name]
    more.setdefault("rich_help_panel", option.panel)
    if option.is_size:
        more |= {"parser": parse_size, "metavar": "SIZE"}
    elif option.metavar:
        more["metavar"] = option.metavar
    flag = "--" + name.replace("_", "-")
    names = (flag, *option.flags) if option.flags else ()
    return typer.Option(*names, help=option.help, autocompletion=completion(option.choices), **more)


def refuse_given(command: typer.Context, names: Collection[str], why: str) -> None:
    """Raises ConfigError for an option among these parameters of the command that was given, even
    with its default as the value."""
    for item in command.command.params:
        source = command.get_parameter_source(item.name or "")
        if item.name in names and getattr(source, "name", "DEFAULT") != "DEFAULT":
            raise ConfigError(f"{item.opts[0]} {why}")


def completion(choices: tuple[str, ...]) -> Any:
    """Returns a completer of these choices for the shell; None where there are none."""
    if not choices:
        return None

    def matching(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return matching


_size_option: Any = functools.partial(typer.Option, parser=parse_size, metavar="SIZE")

# ---- options of several commands

Model = Annotated[
    str,
    typer.Argument(
        help=ENGINE_OPTIONS["model"].help, metavar="MODEL", show_default="the embedded model"
    ),
]
Revision = Annotated[str | None, run_option("revision")]
TokenizerDir = Annotated[str | None, run_option("tokenizer")]
LoadFormat = Annotated[str, run_option("load_format")]
DType = Annotated[str, run_option("dtype")]
WeightGroup = Annotated[int, run_option("weight_group")]
KVDType = Annotated[str, run_option("kv_dtype")]
KVGroup = Annotated[int, run_option("kv_group")]
MaxModelLen = Annotated[int | None, run_option("max_model_len")]
ComputeThreads = Annotated[int | None, run_option("compute_threads")]
Backend = Annotated[str, run_option("backend")]
LogLevel = Annotated[str, run_option("log_level")]
MaxNumSeqs = Annotated[int, run_option("max_num_seqs")]
MaxNumBatchedTokens = Annotated[int | None, run_option("max_num_batched_tokens")]
InterTokenSLO = Annotated[float | None, run_option("inter_token_slo_ms")]
KVCacheBytes = Annotated[int | None, run_option("kv_cache_bytes")]
UsePrefixCache = Annotated[bool, run_option("prefix_cache")]
MemoryPolicy = Annotated[str, run_option("memory_policy")]
Order = Annotated[str, run_option("order")]
TTFTSLO = Annotated[float | None, run_option("ttft_slo")]
NodeKey = Annotated[
    str | None,
    run_option(
        "memory_node_key_file",
        envvar=["MERGESTEP_MEMORY_NODE_KEY_FILE", "MERGESTEP_NODE_KEY_FILE"],
    ),
]
NodeEncryption = Annotated[str, run_option("memory_node_encryption")]
ClientKeyFile = Annotated[
    Path | None,
    typer.Option(
        help=f"A file with the key for --url; by default {API_KEY_ENV} of the environment.",
        show_default=False,
        rich_help_panel=SERVER,
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Take a few seconds and check no targets.")]

# ---- options of `serve node`

NodeUrl = Annotated[
    str, typer.Argument(help="Address: tcp://HOST:PORT, shm:///PATH or rdma://HOST:PORT.")
]
NodeKVBytes = Annotated[
    int | None,
    _size_option(help="K/V of all engines, such as 8GiB; by default 80 % of free memory."),
]

# ---- serve eval --kv-policy

_policy_option: Any = functools.partial(typer.Option, rich_help_panel="K/V policies")

KVPolicies = Annotated[
    list[str] | None,
    _policy_option(
        help="Measure K/V policies on long-range tasks instead: NAME:budget=AMOUNT, NAME for"
        " budgets from 100% to 6%, or all; repeatable."
    ),
]
PolicyContext = Annotated[int, _policy_option(help="Tokens of a prompt.")]
PolicyExercises = Annotated[int, _policy_option(help="Exercises of each task.")]
PolicySeed = Annotated[int, _policy_option(help="Of the tasks.")]
PolicyReference = Annotated[
    bool, _policy_option("--reference", help="Run the reference in torch, not the engine.")
]
PolicyPicture = Annotated[
    Path | None, _policy_option("--png", help="Draw quality against the budget.")
]
