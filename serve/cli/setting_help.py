"""The help, the panel and the notation of every setting of `serve run`.

Names, types and defaults come from EngineConfig, HttpSettings and ProcessSettings, which
run_settings.py joins with these options.
"""

from __future__ import annotations

from serve.cli.setting_panels import (
    LIMITS,
    LOGS,
    MEMORY,
    MODEL,
    NODES,
    ROUTERS,
    SCHEDULING,
    SECURITY,
    SERVER,
    Option,
)
from serve.config import (
    DTYPES,
    GROUP_EXCHANGES,
    KV_DTYPES,
    LENGTH_PREDICTORS,
    LOAD_FORMATS,
    MEMORY_POLICIES,
    MEMORY_PREFILLS,
    MEMORY_WIRES,
    NODE_ENCRYPTIONS,
    PARTITIONS,
    QUEUE_POLICIES,
)
from serve.http.edge.settings import LOG_FORMATS, UNKNOWN_FIELDS
from serve.parser_names import REASONING_PARSERS, TOOL_PARSERS
from serve.setting_checks import KV_EVENT_FORMATS, SPECULATIONS

_BACKENDS = ("auto", "cpu", "cuda")
_LEVELS = ("debug", "info", "warning", "error")

ENGINE_OPTIONS: dict[str, Option] = {
    "model": Option(
        MODEL,
        "A Hugging Face directory, a GGUF file, or ORG/NAME, ORG/NAME:QUANT or ORG/NAME:FILE of the"
        " hub, which is downloaded once (`serve models` lists what is here).",
    ),
    "tokenizer": Option(
        MODEL,
        "A directory whose tokenizer and chat template take the place of the model's.",
        metavar="DIR",
    ),
    "load_format": Option(
        MODEL, "safetensors; random makes random weights, to measure speed.", choices=LOAD_FORMATS
    ),
    "converter": Option(
        MODEL,
        "Serve the model's class of the installed transformers: for models without support here.",
    ),
    "served_model_name": Option(MODEL, "The model's name in the API; by default that of MODEL."),
    "dtype": Option(
        MODEL,
        "Type of the weights: auto, int8, int4, int4-searched (slower to load, more accurate), nf4,"
        " bfloat16 or float32; on newer GPUs also fp8.",
        choices=DTYPES,
    ),
    "weight_group": Option(MODEL, "Inputs that share a scale in int4 and nf4: 16, 32, 64 or 128."),
    "packed_cache": Option(
        MODEL,
        "Where packed weights are kept between starts: off, a directory, or auto (beside the model,"
        " else in the user's cache).",
        metavar="DIR",
    ),
    "packed_cache_bytes": Option(
        MODEL, "Most packed weights in that directory; by default 64GiB.", is_size=True
    ),
    "kv_dtype": Option(
        MODEL,
        "Type of K/V: auto, int8, int4 (longer contexts, less exact), bfloat16 or float32.",
        choices=KV_DTYPES,
        flags=("--kv-cache-dtype",),
    ),
    "kv_group": Option(MODEL, "Values that share a scale in int8 and int4 K/V."),
    "max_model_len": Option(MODEL, "Longest sequence in tokens; by default the model's."),
    "compute_threads": Option(MODEL, "Cores that compute; by default all."),
    "tokenize_threads": Option(MODEL, "Threads that tokenize prompts."),
    "tensor_parallel_size": Option(
        MODEL,
        "Processes that divide every layer's products and heads, with the same results.",
        flags=("--tp",),
    ),
    "pipeline_parallel_size": Option(
        MODEL,
        "Stages into which the layers are divided, a process (or --tp of them) each.",
        flags=("--pp",),
    ),
    "group_restart_s": Option(
        MODEL,
        "How long requests wait for a lost process of the model to be replaced.",
        metavar="SECONDS",
    ),
    "group_url": Option(
        MODEL,
        "Where rank 0 listens, if torchrun or Kubernetes starts the processes; by default the port"
        " after MASTER_PORT.",
        metavar="URL",
    ),
    "group_key_file": Option(
        MODEL,
        "A file with the secret that the processes of several machines share.",
        metavar="FILE",
    ),
    "group_exchange": Option(
        MODEL,
        "How --tp processes of a machine exchange results: auto (GPUs directly, others in shared"
        " memory), host (all in shared memory), or connections.",
        choices=GROUP_EXCHANGES,
    ),
    "tune": Option(
        MODEL, "Measure the fastest kernel of each product at the first start on a GPU."
    ),
    "backend": Option(MODEL, "cpu, cuda, or auto: cuda where there is a GPU.", choices=_BACKENDS),
    "tool_parser": Option(
        MODEL,
        "Format of the model's tool calls; auto looks at its chat template, none refuses tools.",
        choices=TOOL_PARSERS,
    ),
    "reasoning_parser": Option(
        MODEL,
        "Format of the model's reasoning; auto looks at its chat template, none keeps it as text.",
        choices=REASONING_PARSERS,
    ),
    "reasoning_budget": Option(
        MODEL,
        "Most tokens of reasoning in chats that do not say; then the model is made to answer."
        " 0: no reasoning; -1: no bound.",
        metavar="TOKENS",
    ),
    "reasoning_budget_message": Option(
        MODEL,
        "The sentence that the model is made to think last when its reasoning has reached the"
        " bound; empty for none.",
        metavar="TEXT",
    ),
    "bounded_json": Option(
        MODEL,
        "Structured output has only the properties that its schema names, numbers that an int64 or"
        " a double holds, and an end before max_tokens.",
    ),
    "seed": Option(MODEL, "Base of the seeds of requests without one."),
    "max_num_seqs": Option(SCHEDULING, "Most sequences that run at once."),
    "max_num_batched_tokens": Option(
        SCHEDULING, "Most rows of a step; by default 256, on a GPU 2048."
    ),
    "max_chunk_tokens": Option(SCHEDULING, "Most prefill rows of one sequence in a step."),
    "inter_token_slo_ms": Option(
        SCHEDULING,
        "Cut prefills so that streams wait for a token no longer than this.",
        metavar="MS",
        flags=("--inter-token-slo",),
    ),
    "inter_token_factor": Option(
        SCHEDULING,
        "Without that, cut prefills so that a step takes at most this many times as long as its"
        " streams alone; inf does not cut.",
    ),
    "ttft_slo": Option(
        SCHEDULING,
        "Refuse requests whose first token is predicted to come later than this.",
        metavar="SECONDS",
    ),
    "max_num_waiting": Option(SCHEDULING, "Most requests that wait; further ones are refused."),
    "order": Option(
        SCHEDULING,
        f"Queue policy: {', '.join(QUEUE_POLICIES[:-1])} or {QUEUE_POLICIES[-1]}.",
        choices=QUEUE_POLICIES,
    ),
    "speculation": Option(
        SCHEDULING,
        "What proposes tokens that a step computes ahead, without changing an answer: lookup (what"
        " followed the same words before), that and model, mtp (the checkpoint's own head) or"
        " eagle3, or off.",
        choices=SPECULATIONS,
    ),
    "draft_model": Option(
        SCHEDULING,
        "A small model with the same tokenizer (speculation model), or an EAGLE-3 head.",
        metavar="DIR",
    ),
    "max_draft_tokens": Option(
        SCHEDULING, "Most of these tokens of one sequence in a step, up to 15."
    ),
    "kv_cache_bytes": Option(
        MEMORY,
        "Most K/V memory, such as 2GiB; by default 40 % of free memory, on a GPU all that is left.",
        is_size=True,
    ),
    "kv_page_bytes": Option(
        MEMORY,
        "Page of K/V memory, such as 64K; by default about 16 tokens, on a GPU 2 MiB.",
        is_size=True,
    ),
    "prefix_cache": Option(MEMORY, "Share K/V between requests with a common prefix."),
    "kv_cache_dir": Option(
        MEMORY,
        "Directory of the disk tier, for K/V that does not fit into memory; it survives a restart.",
    ),
    "kv_disk_bytes": Option(MEMORY, "Most K/V in --kv-cache-dir; default: 16GiB.", is_size=True),
    "kv_offload_bytes": Option(MEMORY, "Running K/V on disk, beyond memory.", is_size=True),
    "kv_offload_dir": Option(MEMORY, "Its directory; default: the user's cache.", "DIR"),
    "memory_policy": Option(
        MEMORY,
        "Admission by memory: predicted, worst_case or prompt_only.",
        choices=MEMORY_POLICIES,
    ),
    "length_predictor": Option(
        MEMORY,
        "What lengths of answers are predicted from: learned (past answers, the prompt and the"
        " model's hidden state), history (past answers) or auto (learned for the order srpt).",
        choices=LENGTH_PREDICTORS,
    ),
    "length_predictor_file": Option(
        MEMORY, "File that keeps what --length-predictor learned has learned over restarts."
    ),
    "memory_nodes": Option(
        NODES,
        "Comma-separated addresses of the memory nodes that hold K/V and compute attention.",
        metavar="URL,URL",
    ),
    "memory_partition": Option(
        NODES, "Division of K/V between nodes: auto, head, request or sequence.", choices=PARTITIONS
    ),
    "memory_node_bytes": Option(
        NODES, "K/V memory of each node; by default all that is free there.", is_size=True
    ),
    "memory_node_key_file": Option(
        NODES,
        "A file with the secret that engines and memory nodes share (tcp and rdma).",
        metavar="FILE",
        envs=("MERGESTEP_NODE_KEY_FILE",),
    ),
    "memory_node_encryption": Option(
        NODES,
        "Encryption of tcp on both ends: auto (all but loopback), on or off.",
        choices=NODE_ENCRYPTIONS,
    ),
    "memory_prefill": Option(
        NODES, "Where attention of prefills is computed: local or remote.", choices=MEMORY_PREFILLS
    ),
    "memory_wire": Option(
        NODES,
        "Type of numbers sent to nodes: auto, float32, bfloat16 or int8.",
        choices=MEMORY_WIRES,
    ),
    "kvp": Option(
        NODES,
        "Comma-separated addresses of memory nodes onto which long sequences grow, a segment each"
        " in turn; the first segment is here.",
        metavar="URL,URL",
    ),
    "kvp_segment_tokens": Option(NODES, "Tokens of a segment, a multiple of 128."),
    "borrow": Option(
        NODES,
        "Comma-separated addresses of replicas that lend K/V memory: sequences for which there is"
        " none here are there.",
        metavar="URL,URL",
    ),
    "lend": Option(
        NODES,
        "Address where other replicas borrow K/V memory that this one does not need at present.",
        metavar="URL",
    ),
    "lend_bytes": Option(NODES, "The most that is lent; default: half of the K/V memory."),
    "kv_events": Option(
        ROUTERS,
        "Publish which token blocks are cached, as vLLM does, over ZeroMQ at such an address as"
        " tcp://*:5557.",
        metavar="URL",
    ),
    "kv_events_replay_endpoint": Option(
        ROUTERS, "Where all cached blocks are asked for; default: the next port.", metavar="URL"
    ),
    "kv_events_topic": Option(ROUTERS, "Topic of the events; default: kv@HOST@MODEL."),
    "kv_events_format": Option(
        ROUTERS, "Form of an event: array, as vLLM did first, or map.", choices=KV_EVENT_FORMATS
    ),
    "kv_events_salted": Option(
        ROUTERS, "Publish prompts with a cache salt as well, such as those of keys, with the salts."
    ),
    "kv_policy": Option(
        MEMORY,
        "Read (quest) or keep (window, h2o, snapkv, keyformer, pyramid) a part of the K/V; or off.",
        "NAME:budget=N",
    ),
    "kv_peers": Option(MEMORY, "Comma-separated engines whose cached K/V is pulled.", "URL,URL"),
    "kv_listen": Option(MEMORY, "Address where other engines pull cached K/V.", "URL"),
    "kv_peer_key_file": Option(MEMORY, "A file with the secret of engines that pull K/V.", "FILE"),
    "kv_replica_bytes": Option(MEMORY, "Memory for K/V of peers' running streams.", is_size=True),
    "weights_from": Option(MODEL, "Comma-separated replicas that have the weights.", "URL,URL"),
    "weights_listen": Option(MODEL, "Address where other replicas pull the weights.", "URL"),
    "weights_key_file": Option(MODEL, "Their secret; default: kv_peer_key_file.", "FILE"),
    "weights_rate_bytes": Option(MODEL, "The most weights given a second.", is_size=True),
    "weight_memory_bytes": Option(MODEL, "The most memory of all weights.", is_size=True),
    "host_weight_bytes": Option(MODEL, "The most weights in a GPU's host.", is_size=True),
}

HTTP_OPTIONS: dict[str, Option] = {
    "host": Option(SERVER, "Address to listen on."),
    "port": Option(SERVER, "Port to listen on; 0 takes a free one."),
    "drain_s": Option(SERVER, "How long a shutdown waits for running requests.", metavar="SECONDS"),
    "enable_sleep_mode": Option(SERVER, "Serve /sleep, /wake_up and /is_sleeping."),
    "backlog": Option(SERVER, "Most connections that wait to be accepted."),
    "api_keys": Option(
        SECURITY,
        "Comma-separated keys, each KEY or NAME:KEY.",
        envs=("MERGESTEP_API_KEY",),
        is_secret=True,
    ),
    "api_key_file": Option(
        SECURITY,
        "A file of keys that clients must send, with their limits; MERGESTEP_API_KEY holds keys"
        " without limits.",
        metavar="FILE",
    ),
    "hop_key_file": Option(SECURITY, "A file with the secret of `serve front`.", metavar="FILE"),
    "allow_no_key": Option(SECURITY, "Allow an address beyond this machine without keys."),
    "share_prefixes": Option(
        SECURITY, "Share cached prefixes between keys; response times may reveal them."
    ),
    "allowed_hosts": Option(
        SECURITY,
        "Accepted names in the Host header; by default those of a loopback address, else any.",
    ),
    "cors_origins": Option(
        SECURITY, "Origins of web pages that may call the API.", metavar="ORIGIN,ORIGIN"
    ),
    "tls_cert": Option(SECURITY, "A certificate in PEM, which turns HTTPS on.", metavar="FILE"),
    "tls_key": Option(SECURITY, "The certificate's key in PEM.", metavar="FILE"),
    "tls_client_ca": Option(
        SECURITY,
        "CA certificates in PEM; clients must show a certificate signed by one of them.",
        metavar="FILE",
    ),
    "unknown_fields": Option(
        LIMITS,
        "Unknown parameters: refuse them, or warn in a response header.",
        choices=UNKNOWN_FIELDS,
    ),
    "max_body_bytes": Option(LIMITS, "Largest request body.", is_size=True),
    "max_work_bytes": Option(
        LIMITS, "Most expected memory of calls that take far more than their body.", is_size=True
    ),
    "max_bodies_bytes": Option(LIMITS, "Most memory for bodies that are being read.", is_size=True),
    "max_connections": Option(LIMITS, "Most open connections."),
    "max_connections_per_address": Option(LIMITS, "Most open connections of one remote address."),
    "max_calls": Option(LIMITS, "Most requests that are answered at once."),
    "head_timeout_s": Option(
        LIMITS, "Time for a request's head, from its first byte on.", metavar="SECONDS"
    ),
    "body_min_rate": Option(
        LIMITS, "Least bytes per second at which a body must arrive; 0 allows any rate."
    ),
    "request_timeout_s": Option(
        LIMITS, "Time in which an answer must be complete.", metavar="SECONDS"
    ),
    "body_timeout_s": Option(LIMITS, "Time in which a body must arrive.", metavar="SECONDS"),
    "first_request_timeout_s": Option(
        LIMITS, "Time in which a new connection must send a request's head.", metavar="SECONDS"
    ),
    "keepalive_s": Option(
        LIMITS, "Time after which idle connections are closed.", metavar="SECONDS"
    ),
    "write_timeout_s": Option(
        LIMITS, "Time after which a stream whose client does not read is ended.", metavar="SECONDS"
    ),
    "send_buffer_bytes": Option(LIMITS, "The kernel's send buffer of one stream.", is_size=True),
    "parse_inline_bytes": Option(LIMITS, "Larger bodies are parsed in a thread.", is_size=True),
    "max_responses": Option(LIMITS, "Most responses that are stored for later continuation."),
    "max_responses_bytes": Option(LIMITS, "Most memory for stored responses.", is_size=True),
}

HTTP_OPTIONS |= {
    "log_format": Option(LOGS, "Format of log lines: text or json.", choices=LOG_FORMATS),
    "access_log": Option(LOGS, "Log a line for each request."),
    "vllm_metrics": Option(LOGS, "Report metrics under vLLM's names too."),
    "metrics_port": Option(LOGS, "A port of 127.0.0.1 that serves only /metrics, without a key."),
    "otlp_endpoint": Option(
        LOGS, "Send OpenTelemetry spans of requests to this URL.", metavar="URL"
    ),
}

PROCESS_OPTIONS: dict[str, Option] = {
    "log_level": Option(
        LOGS, "Least level that is logged: debug, info, warning or error.", choices=_LEVELS
    ),
    "quiet": Option(LOGS, "Print neither the start summary nor a progress bar.", flags=("-q",)),
    "revision": Option(
        MODEL, "The branch, tag or commit of a MODEL that is named ORG/NAME; by default main."
    ),
}
