"""The summary that `serve run` prints when it is ready: decisions, reasons and capacity."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from memory.kv_memory import KVMemory
from ops.cpu import native_library
from serve.engine.loader import LoadedEngine
from serve.loading.precision import Precision
from serve.machine import process_bytes
from serve.models import count_parameters
from serve.units import format_count, format_memory

if TYPE_CHECKING:
    from serve.engine.engine import Engine
    from serve.http.server import HttpServer

USER_TOKENS = 2048  # the context length for which the number of users is given


def engine_lines(engine: Engine, load_s: float) -> list[tuple[str, str]]:
    """Describes an engine that has started."""
    loaded = engine.loaded
    precision, kv = loaded.precision, loaded.kv
    assert precision is not None and kv is not None, "an engine without a model has no summary"
    config = engine.config
    scheduling = f"up to {config.max_num_seqs:,} sequences, order {config.order}"
    if config.inter_token_slo_ms is not None:
        scheduling += f", a token every {config.inter_token_slo_ms:g} ms"
    if config.ttft_slo is not None:
        scheduling += f", the first within {config.ttft_slo:g} s"
    problem = None if loaded.chat_problem is None else loaded.chat_problem.result()
    chat = [] if problem is None else [("chat", f"not served: {problem}")]
    return [
        ("model", _model(loaded)),
        *chat,
        ("weights", f"{precision.weights_name} ({precision.reason})"),
        ("K/V", f"{precision.kv} ({precision.kv_reason})"),
        *_policy(engine),
        ("computes", _device(precision, config.num_ranks)),
        ("memory", _memory(engine, kv)),
        *_rows(engine.stats().memory_node_rows, precision.backend),
        ("prefixes", _prefixes(engine)),
        ("scheduling", f"{scheduling}, admission {config.memory_policy}"),
        ("started in", f"{load_s:.2f} s; the process has {format_memory(process_bytes())}"),
    ]


def server_lines(server: HttpServer) -> list[tuple[str, str]]:
    """Returns the URLs of the server, and its keys."""
    paths = {route.path for route in server.app.routes}
    lines = [("API", f"{server.url}/v1")]
    if "/" in paths:
        lines.append(("page", f"{server.url}/"))
    if server.metrics is not None:
        lines.append(("metrics", server.metrics.url))
    elif "/metrics" in paths:
        lines.append(("metrics", f"{server.url}/metrics"))
    lines.append(("keys", _keys(server)))
    return lines


def _model(loaded: LoadedEngine) -> str:
    spec = loaded.spec
    counts = count_parameters(spec)
    text = f"{spec.model_type}, {format_count(counts.total)} parameters"
    if counts.active != counts.total:
        text += f", {format_count(counts.active)} active"
    text += f", context {loaded.max_model_len:,}"
    if loaded.max_model_len < spec.max_model_len:
        text += f" of {spec.max_model_len:,}"
    return text


def _device(precision: Precision, num_ranks: int) -> str:
    if precision.backend == "cuda":
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no device"
        return f"on the GPU: {name}"
    if not native_library.is_available():
        return f"on the CPU with torch, {torch.get_num_threads()} threads"
    kernels = f"{native_library.instruction_set()} kernels"
    ranks = "" if num_ranks == 1 else f"{num_ranks} processes of "
    return f"on the CPU: {kernels}, {ranks}{native_library.num_threads()} threads"


def _memory(engine: Engine, kv: KVMemory) -> str:
    """Returns the number of tokens that fit into K/V memory, and that of users, of which at most
    max_num_seqs are served at once."""
    stats = engine.stats()
    of_a_rank = stats.pages_total * stats.kv_page_bytes
    total = of_a_rank * engine.config.num_ranks
    length = min(USER_TOKENS, kv.max_model_len)
    users = min(stats.pages_total // kv.pages_for(length), engine.config.max_num_seqs)
    nodes, kvp = len(engine.config.memory_nodes), len(engine.config.kvp)
    where = f" on memory nodes ({nodes})" if nodes else ""
    wanted = engine.config.kv_cache_bytes or 0
    if engine.config.borrow:
        where = f" here and borrowed ({len(engine.config.borrow)})"
    elif kvp:
        where = f" here, and more on {kvp} nodes for sequences beyond a segment"
    elif engine.loaded.offload is not None:
        where = f", {format_memory(engine.loaded.offload.max_bytes)} of it in memory"
    elif not nodes and wanted >= total + stats.kv_page_bytes:
        where = f" (of {format_memory(wanted)} asked for; the settings never use more)"
    return (
        f"K/V {format_memory(total)}{where}: {of_a_rank // stats.kv_bytes_per_token:,} tokens,"
        f" {users:,} user{'s' if users != 1 else ''} with {length:,} each"
    )


def _policy(engine: Engine) -> list[tuple[str, str]]:
    selection, policy = engine.loaded.selection, engine.config.policy
    verb = "sequences keep"
    if policy is None or not policy.evicts:
        if selection is None:
            return []
        policy, verb = selection.policy, "decoded tokens read"
    least = f", at least {policy.least:,} tokens" if policy.tokens is None else ""
    return [("", f"{verb} {policy.amount} of it{least} ({policy.name})")]


def _rows(by_node: dict[str, str], backend: str) -> list[tuple[str, str]]:
    """Says how rows travel to memory nodes, one line for each way; without a GPU there is one."""
    if backend != "cuda":
        count = len(by_node)
        nodes = "a memory node" if count == 1 else f"{count} memory nodes"
        return [("rows", f"of each step go to {nodes}, which attend to them")] if count else []
    nodes_of: dict[str, int] = {}
    for by in by_node.values():
        nodes_of[by] = nodes_of.get(by, 0) + 1
    texts = []
    for by, count in nodes_of.items():
        name, _, reason = by.partition(": ")
        nodes = "a memory node" if count == 1 else f"{count} memory nodes"
        how = f"by the host, as {reason}" if reason else "by the GPU's stream in decode steps"
        texts.append(f"to {nodes} {how} ({name})")
    return [("rows" if i == 0 else "", text) for i, text in enumerate(texts)]


def _prefixes(engine: Engine) -> str:
    config = engine.config
    if not config.prefix_cache:
        return "not shared"
    return "shared" if config.kv_cache_dir is None else f"shared, kept in {config.kv_cache_dir}"


def _keys(server: HttpServer) -> str:
    if server.num_keys:
        return f"{server.num_keys}, from {_key_sources(server)}"
    return "none: any client that reaches the port may use it"


def _key_sources(server: HttpServer) -> str:
    settings = server.settings
    sources = ["the environment"] if settings.api_keys else []
    return " and ".join(sources + ([settings.api_key_file] if settings.api_key_file else []))


def print_ready(server: HttpServer, engine: Engine, load_s: float, *, is_quiet: bool) -> None:
    """Prints the summary, or only the line with the URL if is_quiet."""
    console = Console()
    ready = f"{engine.model_name} is ready at {server.url}/v1"
    if is_quiet:
        _plain(console, ready)
        return
    _show(console, ready, engine_lines(engine, load_s) + server_lines(server))
    body = {"model": engine.model_name, "messages": [{"role": "user", "content": "Hello!"}]}
    key = ' -H "Authorization: Bearer $KEY"' if server.num_keys else ""
    _plain(
        console,
        f"\ncurl {server.url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"  -d {shlex.quote(json.dumps(body))}",
    )


def _show(console: Console, title: str, lines: list[tuple[str, str]]) -> None:
    if not console.is_terminal:
        _plain(console, "\n".join([title, *(f"  {name:<11} {text}" for name, text in lines)]))
        return
    console.print(title, style="bold green", markup=False, highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    for name, text in lines:
        table.add_row(Text(f"  {name}"), Text(text))
    console.print(table)


def _plain(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
