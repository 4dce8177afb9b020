"""How every setting of `serve run` is offered: its help, its panel, how its value is written.

Names, types and defaults are those of EngineConfig, HttpSettings and ProcessSettings
(run_settings.py joins them); here is only what a dataclass does not say.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve.config import (
    DTYPES,
    KV_DTYPES,
    LOAD_FORMATS,
    MEMORY_POLICIES,
    MEMORY_PREFILLS,
    MEMORY_WIRES,
    ORDERS,
    PARTITIONS,
    REASONING_PARSERS,
    TOOL_PARSERS,
)
from serve.http.edge.settings import LOG_FORMATS, UNKNOWN_FIELDS

SERVER = "Server"
SECURITY = "Security"
MODEL = "Model and precision"
SCHEDULING = "Scheduling"
MEMORY = "Memory"
NODES = "Memory nodes"
LIMITS = "Limits and deadlines"
LOGS = "Logs and metrics"
PANELS = (SERVER, SECURITY, MODEL, SCHEDULING, MEMORY, NODES, LIMITS, LOGS)


@dataclass(frozen=True, slots=True)
class Option:
    """metavar: what stands for the value in the help. is_size: bytes, "2GiB" too. choices: what
    the shell completes. flags, envs: other names that work as well. is_secret: only from the
    environment, and never printed."""

    panel: str
    help: str
    metavar: str | None = None
    is_size: bool = False
    choices: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    envs: tuple[str, ...] = ()
    is_secret: bool = False


_BACKENDS = ("auto", "cpu", "cuda")
_LEVELS = ("debug", "info", "warning", "error")

ENGINE_OPTIONS: dict[str, Option] = {
    "model": Option(
        MODEL,
        "A Hugging Face directory, or the name of a model in the Hugging Face cache"
        " (`serve models` lists them).",
    ),
    "load_format": Option(
        MODEL,
        "safetensors, or random: weights made at random, to measure speed.",
        choices=LOAD_FORMATS,
    ),
    "served_model_name": Option(MODEL, "The name clients use; by default MODEL's own."),
    "dtype": Option(
        MODEL,
        "auto, int8, int4, nf4, bfloat16 or float32; on newer GPUs also fp8.",
        choices=DTYPES,
    ),
    "weight_group": Option(MODEL, "Inputs that share a scale in int4 and nf4: 32, 64 or 128."),
    "kv_dtype": Option(MODEL, "K/V: auto, int8, bfloat16 or float32.", choices=KV_DTYPES),
    "kv_group": Option(MODEL, "Values that share a scale in int8 K/V."),
    "max_model_len": Option(MODEL, "Longest sequence in tokens; the model's by default."),
    "compute_threads": Option(MODEL, "Cores that compute; all by default."),
    "tokenize_threads": Option(MODEL, "Threads that tokenize."),
    "tune": Option(MODEL, "Measure products at the first start on a GPU."),
    "backend": Option(MODEL, "cpu, cuda, or auto: cuda where there is a GPU.", choices=_BACKENDS),
    "tool_parser": Option(
        MODEL,
        "How the model writes calls of tools: auto looks at its chat template; none.",
        choices=TOOL_PARSERS,
    ),
    "reasoning_parser": Option(
        MODEL,
        "What it writes around its reasoning: auto looks at its chat template; none.",
        choices=REASONING_PARSERS,
    ),
    "seed": Option(MODEL, "Base seed of requests that bring none."),
    "max_num_seqs": Option(SCHEDULING, "Sequences that run at once."),
    "max_num_batched_tokens": Option(
        SCHEDULING, "Rows of one step; by default 256, on a GPU 2048."
    ),
    "max_chunk_tokens": Option(SCHEDULING, "Most prompt rows of one sequence in a step."),
    "inter_token_slo_ms": Option(
        SCHEDULING,
        "Cut prompts so that streams wait for a token no longer than this.",
        metavar="MS",
        flags=("--inter-token-slo",),
    ),
    "ttft_slo": Option(
        SCHEDULING,
        "Refuse requests whose first token would come later than after this.",
        metavar="SECONDS",
    ),
    "max_num_waiting": Option(SCHEDULING, "Requests that may wait."),
    "order": Option(SCHEDULING, "Who is next: fcfs, priority, mlfq or fair.", choices=ORDERS),
    "kv_cache_bytes": Option(
        MEMORY,
        "Most K/V memory, such as 2GiB; by default 40 % of what is free, on a GPU the rest.",
        is_size=True,
    ),
    "kv_page_bytes": Option(
        MEMORY,
        "Unit of K/V memory, such as 64K; by default about 16 tokens, on a GPU 2 MiB.",
        is_size=True,
    ),
    "prefix_cache": Option(MEMORY, "Share K/V between requests that begin alike."),
    "kv_cache_dir": Option(MEMORY, "K/V that memory has no room for goes here, and stays."),
    "kv_disk_bytes": Option(
        MEMORY, "Most that --kv-cache-dir holds of a model; by default 16GiB.", is_size=True
    ),
    "memory_policy": Option(
        MEMORY, "Admission: predicted, worst_case or prompt_only.", choices=MEMORY_POLICIES
    ),
    "memory_nodes": Option(
        NODES, "Addresses with commas between: K/V and attention go there.", metavar="URL,URL"
    ),
    "memory_partition": Option(
        NODES, "What each node gets: auto, head, request or sequence.", choices=PARTITIONS
    ),
    "memory_node_bytes": Option(
        NODES, "K/V on each memory node; by default all that is free there.", is_size=True
    ),
    "memory_node_key_file": Option(
        NODES,
        "A file with the secret that engines and memory nodes share (tcp and rdma).",
        metavar="FILE",
        envs=("MERGESTEP_NODE_KEY_FILE",),
    ),
    "memory_prefill": Option(
        NODES, "Who attends over a prompt in progress: local or remote.", choices=MEMORY_PREFILLS
    ),
    "memory_wire": Option(
        NODES, "Numbers on the way: auto, float32, bfloat16 or int8.", choices=MEMORY_WIRES
    ),
}

HTTP_OPTIONS: dict[str, Option] = {
    "host": Option(SERVER, "Address to listen on."),
    "port": Option(SERVER, "Port; 0 takes a free one."),
    "drain_s": Option(SERVER, "How long a stop waits for requests.", metavar="SECONDS"),
    "backlog": Option(SERVER, "Connections that wait to be accepted."),
    "api_keys": Option(
        SECURITY,
        "KEY or NAME:KEY, with commas between.",
        envs=("MERGESTEP_API_KEY",),
        is_secret=True,
    ),
    "api_key_file": Option(
        SECURITY,
        "Keys that clients must send, with their limits. Keys without: MERGESTEP_API_KEY.",
        metavar="FILE",
    ),
    "allow_no_key": Option(SECURITY, "Listen on other addresses than this machine's without keys."),
    "share_prefixes": Option(SECURITY, "Keys share cached prompts, and may tell it from the time."),
    "allowed_hosts": Option(
        SECURITY, "Names in the Host header; by default those of a loopback address, else any."
    ),
    "cors_origins": Option(
        SECURITY, "Origins whose pages may call from a browser.", metavar="ORIGIN,ORIGIN"
    ),
    "tls_cert": Option(SECURITY, "A certificate in PEM; with it HTTPS is spoken.", metavar="FILE"),
    "tls_key": Option(SECURITY, "The certificate's key in PEM.", metavar="FILE"),
    "tls_client_ca": Option(
        SECURITY, "Clients must show a certificate signed by one of these.", metavar="FILE"
    ),
    "unknown_fields": Option(
        LIMITS,
        "Parameters that nobody knows: refuse them, or warn (a header names them).",
        choices=UNKNOWN_FIELDS,
    ),
    "max_body_bytes": Option(LIMITS, "Largest body of a request.", is_size=True),
    "max_bodies_bytes": Option(LIMITS, "Bodies that are read at once.", is_size=True),
    "max_connections": Option(LIMITS, "Open connections."),
    "max_connections_per_address": Option(LIMITS, "Open connections of one other machine."),
    "max_calls": Option(LIMITS, "Requests that are answered at once."),
    "head_timeout_s": Option(LIMITS, "A request's head must be there by then.", metavar="SECONDS"),
    "body_min_rate": Option(LIMITS, "Bytes per second a body must come with; 0: any."),
    "request_timeout_s": Option(LIMITS, "An answer must be complete by then.", metavar="SECONDS"),
    "body_timeout_s": Option(LIMITS, "A body must be there by then.", metavar="SECONDS"),
    "first_request_timeout_s": Option(
        LIMITS, "A new connection must have sent a request's head by then.", metavar="SECONDS"
    ),
    "keepalive_s": Option(LIMITS, "Idle connections are closed after this.", metavar="SECONDS"),
    "write_timeout_s": Option(
        LIMITS, "A stream that nobody reads is ended after this.", metavar="SECONDS"
    ),
    "send_buffer_bytes": Option(LIMITS, "The kernel's buffer of one stream.", is_size=True),
    "parse_inline_bytes": Option(
        LIMITS, "Larger bodies are parsed beside the event loop.", is_size=True
    ),
    "max_responses": Option(LIMITS, "Responses that are kept, to be continued."),
    "max_responses_bytes": Option(LIMITS, "Memory for kept responses.", is_size=True),
}

HTTP_OPTIONS |= {
    "log_format": Option(LOGS, "text or json, a line each.", choices=LOG_FORMATS),
    "access_log": Option(LOGS, "A line for each request."),
    "vllm_metrics": Option(LOGS, "Tell metrics by vLLM's names, too."),
    "metrics_port": Option(LOGS, "A port of 127.0.0.1 for /metrics alone, without a key."),
    "otlp_endpoint": Option(LOGS, "Send OpenTelemetry spans of requests there.", metavar="URL"),
}

PROCESS_OPTIONS: dict[str, Option] = {
    "log_level": Option(LOGS, "debug, info, warning or error.", choices=_LEVELS),
    "quiet": Option(LOGS, "No summary at the start, no progress bar.", flags=("-q",)),
}
