"""The options of the `serve` command: their types, help and units."""

from __future__ import annotations

import functools
import re
from typing import Annotated, Any

import typer

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """ "2GiB", "512M", "1e3"-free plain bytes. K, M, G and T are powers of 1024 here."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 512M or 2GiB")
    return int(float(match[1]) * 1024 ** _POWERS[match[2].upper()])


_a_size: Any = functools.partial(typer.Option, parser=parse_size, metavar="SIZE")

# ---- of several commands

Model = Annotated[
    str,
    typer.Argument(
        help="A Hugging Face directory.", metavar="MODEL", show_default="the embedded model"
    ),
]
LoadFormat = Annotated[
    str, typer.Option(help="safetensors, or random: weights made at random, to measure speed.")
]
DType = Annotated[
    str, typer.Option(help="auto, int8, int4, nf4, bfloat16 or float32; on newer GPUs also fp8.")
]
WeightGroup = Annotated[
    int, typer.Option(help="Inputs that share a scale in int4 and nf4: 32, 64 or 128.")
]
KVDType = Annotated[str, typer.Option(help="K/V: auto, int8, bfloat16 or float32.")]
KVGroup = Annotated[int, typer.Option(help="Values that share a scale in int8 K/V.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest sequence in tokens; the model's by default.")
]
ComputeThreads = Annotated[int | None, typer.Option(help="Cores that compute; all by default.")]
Backend = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is a GPU.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
NodeKey = Annotated[
    str | None,
    typer.Option(
        envvar="MERGESTEP_NODE_KEY_FILE",
        help="A file with the secret that engines and memory nodes share (tcp and rdma).",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="A few seconds, and no targets.")]

# ---- of `serve run`: the server

Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port; 0 takes a free one.")]
DrainRequests = Annotated[float, typer.Option(help="How long a stop waits for requests.")]
ServedModelName = Annotated[
    str | None, typer.Option(help="The name clients use; the directory's by default.")
]
TokenizeThreads = Annotated[int, typer.Option(help="Threads that tokenize.")]
Seed = Annotated[int | None, typer.Option(help="Base seed of requests that bring none.")]

# scheduling

MaxNumSeqs = Annotated[int, typer.Option(help="Sequences that run at once.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Rows of one step.")]
MaxChunkTokens = Annotated[
    int | None, typer.Option(help="Most prompt rows of one sequence in a step.")
]
InterTokenSLO = Annotated[
    float | None,
    typer.Option(
        "--inter-token-slo",
        metavar="MS",
        help="Cut prompts so that streams wait for a token no longer than this.",
    ),
]
MaxNumWaiting = Annotated[int, typer.Option(help="Requests that may wait.")]
MemoryPolicy = Annotated[str, typer.Option(help="Admission: predicted, worst_case or prompt_only.")]
Order = Annotated[str, typer.Option(help="Who is next: fcfs, priority, mlfq or fair.")]
TTFTSLO = Annotated[
    float | None, typer.Option(help="Refuse whose first token would come after that many s.")
]

# K/V, here and on memory nodes

KVCacheBytes = Annotated[
    int | None,
    _a_size(
        help="Most K/V memory, such as 2GiB; by default 40 % of what is free, on a GPU the rest."
    ),
]
KVPageBytes = Annotated[
    int | None,
    _a_size(help="Unit of K/V memory, such as 64K; by default about 16 tokens, on a GPU 2 MiB."),
]
UsePrefixCache = Annotated[bool, typer.Option(help="Share K/V between requests that begin alike.")]
Tune = Annotated[bool, typer.Option(help="Measure products at the first start on a GPU.")]
KVCacheDir = Annotated[
    str | None, typer.Option(help="K/V that memory has no room for goes here, and stays.")
]
KVDiskBytes = Annotated[
    int | None, _a_size(help="Most that --kv-cache-dir holds of a model; by default 16GiB.")
]
MemoryNodes = Annotated[
    str | None, typer.Option(help="Memory nodes, with commas between: K/V and attention go there.")
]
MemoryPartition = Annotated[
    str, typer.Option(help="What each node gets: auto, head, request or sequence.")
]
MemoryNodeBytes = Annotated[
    int | None, _a_size(help="K/V on each memory node; by default all that is free there.")
]
MemoryPrefill = Annotated[
    str, typer.Option(help="Who attends over a prompt in progress: local or remote.")
]
MemoryWire = Annotated[str, typer.Option(help="To memory nodes: auto, float32, bfloat16 or int8.")]

# ---- of `serve node`

NodeUrl = Annotated[
    str, typer.Argument(help="Where: tcp://HOST:PORT, shm:///PATH or rdma://HOST:PORT.")
]
NodeKVBytes = Annotated[
    int | None, _a_size(help="K/V of all engines, such as 8GiB; by default 80 % of what is free.")
]
