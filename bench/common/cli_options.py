"""The options of `serve bench`: their types and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve.errors import ConfigError


def whole_numbers(name: str, text: str | None) -> list[int] | None:
    """ "1,8,64"; None stays None. name: of the option, for the error."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as exc:
        raise ConfigError(f"{name} must be whole numbers with commas, not {text!r}") from exc


_LOAD, _SENT, _TARGET = "The load", "What is sent", "What is measured"
_JUDGED, _FILES = "How it is judged", "Files"

# ---- the load

Qps = Annotated[
    str | None,
    typer.Option(
        help="Requests per second: R, inf (all at once), LOW:HIGH:N (N rates between) or several"
        " with commas. 1 by default.",
        rich_help_panel=_LOAD,
        show_default=False,
    ),
]
Arrival = Annotated[
    str,
    typer.Option(
        help="poisson, constant, gamma:K (K below 1: bursts), ramp:LOW:HIGH (a rising"
        " rate) or trace (its own times).",
        rich_help_panel=_LOAD,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        help="How many; 100 by default, with --find-max-qps what half a minute needs.",
        rich_help_panel=_LOAD,
    ),
]
Duration = Annotated[
    float | None, typer.Option(help="Seconds of load instead.", rich_help_panel=_LOAD)
]
Speedup = Annotated[
    float | None,
    typer.Option(help="How much faster than its own time a trace runs.", rich_help_panel=_LOAD),
]
Seed = Annotated[int, typer.Option(help="Of arrivals and prompts.", rich_help_panel=_LOAD)]
Seeds = Annotated[
    int,
    typer.Option(
        help="Repeat every rate with so many seeds; figures get intervals from them.",
        rich_help_panel=_LOAD,
    ),
]
Warmup = Annotated[
    int, typer.Option(help="Requests sent before, one by one.", rich_help_panel=_LOAD)
]
WarmupS = Annotated[
    float,
    typer.Option(
        "--warmup-seconds",
        help="Seconds at the beginning that are sent but not counted.",
        rich_help_panel=_LOAD,
    ),
]
Grace = Annotated[
    float | None,
    typer.Option(
        "--grace",
        help="Seconds after the last arrival; what has not ended then is counted as incomplete."
        " By default all are waited for.",
        rich_help_panel=_LOAD,
    ),
]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(
        help="At most so many at once. This closes the loop: a slow server is asked less.",
        rich_help_panel=_LOAD,
    ),
]
CancelRate = Annotated[
    float, typer.Option(help="Share of the requests that we cancel.", rich_help_panel=_LOAD)
]
CancelAfter = Annotated[
    float | None,
    typer.Option(
        "--cancel-after", help="So many seconds after they were sent.", rich_help_panel=_LOAD
    ),
]
CancelAfterChunks = Annotated[
    int | None,
    typer.Option(help="After so many pieces of text; 3 by default.", rich_help_panel=_LOAD),
]
ProbeQps = Annotated[
    float,
    typer.Option(
        help="Requests of one token beside the load, so many a second, with figures of their own.",
        rich_help_panel=_LOAD,
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        help="Processes that send; by default as many as the rate needs.", rich_help_panel=_LOAD
    ),
]

# ---- what is sent

Dataset = Annotated[
    str | None,
    typer.Option(
        help="mixed (the embedded model's own conversations), random, prefix, azure-conv,"
        " azure-code, kimi-conv, kimi-ta, or a file: sharegpt:F, jsonl:F, mooncake:F, azure:F,"
        " burstgpt:F. By default mixed, with --input-len random.",
        rich_help_panel=_SENT,
        show_default=False,
    ),
]
InputLen = Annotated[
    str | None,
    typer.Option(
        help="Tokens of random prompts: N, LOW:HIGH or lognormal:MEAN:MEDIAN.",
        rich_help_panel=_SENT,
    ),
]
OutputLen = Annotated[
    str | None,
    typer.Option(
        help="Tokens of answers, likewise: exact for made-up prompts, else at most.",
        rich_help_panel=_SENT,
    ),
]
TraceStart = Annotated[
    float, typer.Option(help="Seconds of a trace that are left out.", rich_help_panel=_SENT)
]
TraceEnd = Annotated[
    float | None, typer.Option(help="Second of a trace to stop at.", rich_help_panel=_SENT)
]
BlockSize = Annotated[
    int, typer.Option(help="Tokens of a hash id in a Mooncake trace.", rich_help_panel=_SENT)
]
Groups = Annotated[
    int, typer.Option("--groups", help="Shared prefixes in dataset prefix.", rich_help_panel=_SENT)
]
PrefixLen = Annotated[int, typer.Option(help="Tokens of each.", rich_help_panel=_SENT)]
Turns = Annotated[int, typer.Option("--turns", help="Turns of each.", rich_help_panel=_SENT)]
TextPrompts = Annotated[
    bool,
    typer.Option(
        "--text-prompts",
        help="Words instead of token ids, for servers that take none.",
        rich_help_panel=_SENT,
    ),
]

# ---- what is measured

Url = Annotated[
    str | None,
    typer.Option(help="A server with an OpenAI API.", rich_help_panel=_TARGET),
]
InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="An engine in this process, without HTTP: the default without --url.",
        rich_help_panel=_TARGET,
    ),
]
Simulate = Annotated[
    bool,
    typer.Option(
        "--simulate",
        help="The scheduler and its memory on a virtual clock, no model.",
        rich_help_panel=_TARGET,
    ),
]
Machine = Annotated[
    str | None,
    typer.Option(
        help="What is simulated: a name of `serve plan --list`, 4xNAME, here (measured) or a fitted"
        " cost; h100-sxm by default.",
        rich_help_panel=_TARGET,
        show_default=False,
    ),
]
ServerModel = Annotated[
    str | None,
    typer.Option(help="The model's name at --url; its first by default.", rich_help_panel=_TARGET),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with the key of --url; MERGESTEP_API_KEY or OPENAI_API_KEY by default.",
        rich_help_panel=_TARGET,
        show_default=False,
    ),
]
Header = Annotated[
    list[str] | None,
    typer.Option(help="NAME: VALUE for every request; repeat it.", rich_help_panel=_TARGET),
]
Timeout = Annotated[
    float | None, typer.Option(help="Most seconds for one request.", rich_help_panel=_TARGET)
]

# ---- how it is judged

SLOs = Annotated[
    str | None,
    typer.Option(
        "--slo",
        help="What a good request keeps, in ms: ttft=200,tpot=50,itl=50,e2e=2000, or chat, rag,"
        " code, content.",
        rich_help_panel=_JUDGED,
    ),
]
SLOFrom = Annotated[
    str,
    typer.Option(
        "--slo-from", help="Where its clock starts: schedule or send.", rich_help_panel=_JUDGED
    ),
]
FindMaxQps = Annotated[
    bool,
    typer.Option(
        "--find-max-qps",
        help="Find the highest rate at which --slo is kept; --qps is where to begin.",
        rich_help_panel=_JUDGED,
    ),
]
Attainment = Annotated[
    float,
    typer.Option(help="Share of requests that must keep it.", rich_help_panel=_JUDGED),
]
Resolution = Annotated[
    float, typer.Option(help="How close the rate has to be found.", rich_help_panel=_JUDGED)
]

# ---- files

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Settings, machine, figures.", rich_help_panel=_FILES),
]
JsonlFile = Annotated[
    Path | None, typer.Option("--jsonl", help="Every request, a line each.", rich_help_panel=_FILES)
]
HtmlFile = Annotated[
    Path | None,
    typer.Option("--html", help="A report to look at, in one file.", rich_help_panel=_FILES),
]
PngFile = Annotated[Path | None, typer.Option("--png", help="Its plots.", rich_help_panel=_FILES)]
