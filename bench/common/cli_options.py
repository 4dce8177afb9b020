"""The panel and help of each option of `serve bench`.

Names, types and defaults are those of `OnlineOptions` (bench/load/workload/online_options.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from serve.errors import ConfigError

LOAD, SENT, TARGET = "The load", "What is sent", "What is measured"
JUDGED, FILES = "How it is judged", "Files"
ENGINE = "The engine, here or simulated"


@dataclass(frozen=True, slots=True)
class LoadOption:
    """panel: the option's heading in the help. flag: its name, unless it is the field's."""

    panel: str
    help: str
    flag: str = ""


def whole_numbers(name: str, text: str | None) -> list[int] | None:
    """Parses "1,8,64"; None stays None. name is the option's, for the ConfigError."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as exc:
        raise ConfigError(f"{name} must be whole numbers with commas, not {text!r}") from exc


LOAD_OPTIONS: dict[str, LoadOption] = {
    "revision": LoadOption(
        TARGET, "The branch, tag or commit of a MODEL that is named ORG/NAME; by default main."
    ),
    "qps": LoadOption(
        LOAD,
        "Requests per second: R, inf (all at once), LOW:HIGH:N (N rates between them) or"
        " several rates with commas. The default is 1.",
    ),
    "arrival": LoadOption(
        LOAD,
        "Arrival process: poisson, constant, gamma:K (K below 1 makes bursts), ramp:LOW:HIGH (a"
        " rising rate) or trace (the trace's own times).",
    ),
    "requests": LoadOption(
        LOAD,
        "Number of requests. The default is 100; with --find-max-qps it is what half a minute"
        " needs.",
    ),
    "duration": LoadOption(LOAD, "Seconds of load, instead of --requests."),
    "speedup": LoadOption(LOAD, "Replay a trace this many times as fast as its own time."),
    "seed": LoadOption(LOAD, "Seed of arrivals and prompts."),
    "seeds": LoadOption(
        LOAD, "Repeat every rate with this many seeds, which gives the figures their intervals."
    ),
    "warmup": LoadOption(LOAD, "Requests sent one by one before the load."),
    "warmup_s": LoadOption(
        LOAD,
        "Seconds at the beginning whose requests are sent but not counted.",
        flag="--warmup-seconds",
    ),
    "grace_s": LoadOption(
        LOAD,
        "Seconds after the last arrival; a request that has not ended then counts as"
        " incomplete. By default the run waits for all.",
        flag="--grace",
    ),
    "max_concurrency": LoadOption(
        LOAD, "Most requests at once. This closes the loop: a slow server gets fewer requests."
    ),
    "cancel_rate": LoadOption(LOAD, "Share of the requests that the client cancels."),
    "cancel_after_s": LoadOption(
        LOAD, "Cancel this many seconds after the request was sent.", flag="--cancel-after"
    ),
    "cancel_after_chunks": LoadOption(
        LOAD, "Cancel after this many pieces of text. The default is 3."
    ),
    "probe_qps": LoadOption(
        LOAD,
        "Send this many one-token requests per second beside the load; they get figures of their"
        " own.",
    ),
    "processes": LoadOption(
        LOAD, "Processes that send. By default there are as many as the rate needs."
    ),
    "dataset": LoadOption(
        SENT,
        "mixed (the embedded model's own conversations), random, prefix, azure-conv,"
        " azure-code, kimi-conv, kimi-ta, or a file: sharegpt:F, jsonl:F, mooncake:F, azure:F,"
        " burstgpt:F. The default is mixed; with --input-len it is random.",
    ),
    "input_len": LoadOption(
        SENT, "Tokens of random prompts: N, LOW:HIGH or lognormal:MEAN:MEDIAN."
    ),
    "output_len": LoadOption(
        SENT, "Tokens of answers, in the same form: exact for made-up prompts, otherwise a limit."
    ),
    "trace_start": LoadOption(SENT, "Skip this many seconds of a trace."),
    "trace_end": LoadOption(SENT, "Stop at this second of a trace."),
    "block_size": LoadOption(SENT, "Tokens of a hash id in a Mooncake trace."),
    "num_groups": LoadOption(SENT, "Number of shared prefixes in dataset prefix.", flag="--groups"),
    "prefix_len": LoadOption(SENT, "Tokens of each shared prefix."),
    "num_turns": LoadOption(SENT, "Turns of each session in dataset prefix.", flag="--turns"),
    "as_text": LoadOption(
        SENT,
        "Send words instead of token ids, for servers that take no token ids.",
        flag="--text-prompts",
    ),
    "url": LoadOption(TARGET, "Measure a server with an OpenAI API."),
    "in_process": LoadOption(
        TARGET,
        "Measure an engine in this process, without HTTP. This is the default without --url.",
    ),
    "simulate": LoadOption(
        TARGET, "Run the scheduler and its memory on a virtual clock, without a model."
    ),
    "machine": LoadOption(
        TARGET,
        "Machine to simulate: a name of `serve plan --list`, 4xNAME, here (measured) or a"
        " fitted cost. The default is h100-sxm.",
    ),
    "server_model": LoadOption(
        TARGET, "Name of the model at --url. The default is the server's first."
    ),
    "api_key_file": LoadOption(
        TARGET,
        "File with the key of --url. The default is MERGESTEP_API_KEY or OPENAI_API_KEY of the"
        " environment.",
    ),
    "header": LoadOption(
        TARGET, "Header NAME: VALUE of every request. Repeat the option for more."
    ),
    "timeout": LoadOption(TARGET, "Most seconds for one request."),
    "slo": LoadOption(
        JUDGED,
        "Limits of a good request in ms: ttft=200,tpot=50,itl=50,e2e=2000; or chat, rag, code,"
        " content.",
    ),
    "slo_from": LoadOption(JUDGED, "Where TTFT and E2E start: schedule or send."),
    "find_max_qps": LoadOption(
        JUDGED, "Find the highest rate at which --slo is met. The search begins at --qps."
    ),
    "attainment": LoadOption(JUDGED, "Share of requests that must meet the SLO."),
    "resolution": LoadOption(JUDGED, "Relative precision of the rate that is searched for."),
    "json_file": LoadOption(FILES, "Write settings, machine and figures.", flag="--json"),
    "jsonl_file": LoadOption(FILES, "Write every request, one per line.", flag="--jsonl"),
    "html_file": LoadOption(FILES, "Write a report as one HTML file.", flag="--html"),
    "png_file": LoadOption(FILES, "Write the plots of the report.", flag="--png"),
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
    "inter_token_factor",
    "kv_cache_bytes",
    "prefix_cache",
    "memory_policy",
    "order",
    "speculation",
    "ttft_slo",
    "compute_threads",
    "backend",
)
