"""How `serve bench` offers each field of `OnlineOptions`, and parts that other commands share.

Names, types and defaults are those of the dataclass (bench/load/workload/load_options.py); here is
only what it does not say.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve.errors import ConfigError

LOAD, SENT, TARGET = "The load", "What is sent", "What is measured"
JUDGED, FILES = "How it is judged", "Files"
ENGINE = "The engine, here or simulated"


@dataclass(frozen=True, slots=True)
class LoadOption:
    """panel: the heading in the help. flag: where it is not the field's name."""

    panel: str
    help: str
    flag: str = ""


def whole_numbers(name: str, text: str | None) -> list[int] | None:
    """ "1,8,64"; None stays None. name: of the option, for the error."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as exc:
        raise ConfigError(f"{name} must be whole numbers with commas, not {text!r}") from exc


LOAD_OPTIONS: dict[str, LoadOption] = {
    "qps": LoadOption(
        LOAD,
        "Requests per second: R, inf (all at once), LOW:HIGH:N (N rates between) or several"
        " with commas. 1 by default.",
    ),
    "arrival": LoadOption(
        LOAD,
        "poisson, constant, gamma:K (K below 1: bursts), ramp:LOW:HIGH (a rising rate) or"
        " trace (its own times).",
    ),
    "requests": LoadOption(
        LOAD,
        "How many; 100 by default, with --find-max-qps what half a minute needs.",
    ),
    "duration": LoadOption(
        LOAD,
        "Seconds of load instead.",
    ),
    "speedup": LoadOption(
        LOAD,
        "How much faster than its own time a trace runs.",
    ),
    "seed": LoadOption(
        LOAD,
        "Of arrivals and prompts.",
    ),
    "seeds": LoadOption(
        LOAD,
        "Repeat every rate with so many seeds; figures get intervals from them.",
    ),
    "warmup": LoadOption(
        LOAD,
        "Requests sent before, one by one.",
    ),
    "warmup_s": LoadOption(
        LOAD,
        "Seconds at the beginning that are sent but not counted.",
        flag="--warmup-seconds",
    ),
    "grace_s": LoadOption(
        LOAD,
        "Seconds after the last arrival; what has not ended then is counted as incomplete."
        " By default all are waited for.",
        flag="--grace",
    ),
    "max_concurrency": LoadOption(
        LOAD,
        "At most so many at once. This closes the loop: a slow server is asked less.",
    ),
    "cancel_rate": LoadOption(
        LOAD,
        "Share of the requests that we cancel.",
    ),
    "cancel_after_s": LoadOption(
        LOAD,
        "So many seconds after they were sent.",
        flag="--cancel-after",
    ),
    "cancel_after_chunks": LoadOption(
        LOAD,
        "After so many pieces of text; 3 by default.",
    ),
    "probe_qps": LoadOption(
        LOAD,
        "Requests of one token beside the load, so many a second, with figures of their own.",
    ),
    "processes": LoadOption(
        LOAD,
        "Processes that send; by default as many as the rate needs.",
    ),
    "dataset": LoadOption(
        SENT,
        "mixed (the embedded model's own conversations), random, prefix, azure-conv,"
        " azure-code, kimi-conv, kimi-ta, or a file: sharegpt:F, jsonl:F, mooncake:F,"
        " azure:F, burstgpt:F. By default mixed, with --input-len random.",
    ),
    "input_len": LoadOption(
        SENT,
        "Tokens of random prompts: N, LOW:HIGH or lognormal:MEAN:MEDIAN.",
    ),
    "output_len": LoadOption(
        SENT,
        "Tokens of answers, likewise: exact for made-up prompts, else at most.",
    ),
    "trace_start": LoadOption(
        SENT,
        "Seconds of a trace that are left out.",
    ),
    "trace_end": LoadOption(
        SENT,
        "Second of a trace to stop at.",
    ),
    "block_size": LoadOption(
        SENT,
        "Tokens of a hash id in a Mooncake trace.",
    ),
    "num_groups": LoadOption(
        SENT,
        "Shared prefixes in dataset prefix.",
        flag="--groups",
    ),
    "prefix_len": LoadOption(
        SENT,
        "Tokens of each.",
    ),
    "num_turns": LoadOption(
        SENT,
        "Turns of each.",
        flag="--turns",
    ),
    "as_text": LoadOption(
        SENT,
        "Words instead of token ids, for servers that take none.",
        flag="--text-prompts",
    ),
    "url": LoadOption(
        TARGET,
        "A server with an OpenAI API.",
    ),
    "in_process": LoadOption(
        TARGET,
        "An engine in this process, without HTTP: the default without --url.",
    ),
    "simulate": LoadOption(
        TARGET,
        "The scheduler and its memory on a virtual clock, no model.",
    ),
    "machine": LoadOption(
        TARGET,
        "What is simulated: a name of `serve plan --list`, 4xNAME, here (measured) or a"
        " fitted cost; h100-sxm by default.",
    ),
    "server_model": LoadOption(
        TARGET,
        "The model's name at --url; its first by default.",
    ),
    "api_key_file": LoadOption(
        TARGET,
        "A file with the key of --url; MERGESTEP_API_KEY or OPENAI_API_KEY by default.",
    ),
    "header": LoadOption(
        TARGET,
        "NAME: VALUE for every request; repeat it.",
    ),
    "timeout": LoadOption(
        TARGET,
        "Most seconds for one request.",
    ),
    "slo": LoadOption(
        JUDGED,
        "What a good request keeps, in ms: ttft=200,tpot=50,itl=50,e2e=2000, or chat, rag,"
        " code, content.",
    ),
    "slo_from": LoadOption(
        JUDGED,
        "Where its clock starts: schedule or send.",
    ),
    "find_max_qps": LoadOption(
        JUDGED,
        "Find the highest rate at which --slo is kept; --qps is where to begin.",
    ),
    "attainment": LoadOption(
        JUDGED,
        "Share of requests that must keep it.",
    ),
    "resolution": LoadOption(
        JUDGED,
        "How close the rate has to be found.",
    ),
    "json_file": LoadOption(
        FILES,
        "Settings, machine, figures.",
        flag="--json",
    ),
    "jsonl_file": LoadOption(
        FILES,
        "Every request, a line each.",
        flag="--jsonl",
    ),
    "html_file": LoadOption(
        FILES,
        "A report to look at, in one file.",
        flag="--html",
    ),
    "png_file": LoadOption(
        FILES,
        "Its plots.",
        flag="--png",
    ),
}

# The fields of EngineConfig that are options of `serve bench` too.
ENGINE_SETTINGS = (
    "load_format",
    "dtype",
    "kv_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "inter_token_slo_ms",
    "kv_cache_bytes",
    "prefix_cache",
    "memory_policy",
    "order",
    "ttft_slo",
    "compute_threads",
    "backend",
)
