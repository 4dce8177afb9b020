"""Checks of settings of several kinds; ConfigError names the setting."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict

from memory.policies.setting import OFF, KVPolicy, parse_kv_policy
from serve.errors import ConfigError
from serve.node_addresses import check_address, check_endpoint, checked_addresses

MAX_MESSAGE_CHARS = 1024
MAX_DRAFT_TOKENS = 15  # grammars follow a sequence as long as no more of its last tokens change
SPECULATIONS = ("lookup", "model", "mtp", "eagle3", "off")
DRAFT_HEADS = ("mtp", "eagle3")
_WITH_DRAFT_MODEL = ("model", "eagle3")
KV_EVENT_FORMATS = ("array", "map")
_WITHOUT_KV_POLICY = (
    "converter",
    "memory_nodes",
    "kvp",
    "borrow",
    "lend",
    "kv_peers",
    "kv_listen",
    "kv_replica_bytes",
)
MAX_NUM_SEQS = 1 << 20  # each reserves a range of addresses


class _Counts(Protocol):
    """The settings, of which these checks read more than they name."""

    @property
    def max_num_seqs(self) -> int: ...


class _Drafts(Protocol):
    """The settings of speculation, and those that exclude a draft model."""

    @property
    def speculation(self) -> str: ...

    @property
    def draft_model(self) -> object: ...

    @property
    def max_draft_tokens(self) -> int: ...


def check_texts(config: object, names: Iterable[str]) -> None:
    for setting in names:
        name = getattr(config, setting)
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(f"{setting} must be a non-empty string, not {name!r}")


def check_flags(config: object, names: Iterable[str]) -> None:
    for name in names:
        if type(getattr(config, name)) is not bool:
            raise ConfigError(f"{name} must be true or false, not {getattr(config, name)!r}")


def check_choices(config: object, choices: Mapping[str, Collection[object]]) -> None:
    """Checks settings that have one of a few values."""
    for setting, known in choices.items():
        value = getattr(config, setting)
        if value not in known or type(value) not in {type(each) for each in known}:
            names = ", ".join(map(str, known))
            raise ConfigError(f"{setting} must be one of {names}, not {value!r}")


def check_times(slo_ms: object, factor: object, restart_s: object, ttft_s: object) -> None:
    """Checks inter_token_slo_ms, inter_token_factor, group_restart_s and ttft_slo."""
    if slo_ms is not None and not _is_positive(slo_ms):
        raise ConfigError(f"inter_token_slo_ms must be a positive number, not {slo_ms!r}")
    if not (isinstance(factor, int | float) and type(factor) is not bool and factor > 1):
        raise ConfigError(f"inter_token_factor must be a number above 1, not {factor!r}")
    if not _is_positive(restart_s) and (type(restart_s) not in (int, float) or restart_s != 0):
        text = f"group_restart_s must be a number of seconds from 0 on, not {restart_s!r}"
        raise ConfigError(text)
    if ttft_s is not None and not _is_positive(ttft_s):
        raise ConfigError(f"ttft_slo must be a positive number of seconds, not {ttft_s!r}")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and 0 < value < math.inf


def check_reasoning(budget: object, message: object) -> None:
    if budget is not None and (type(budget) is not int or budget < -1):
        raise ConfigError(f"reasoning_budget must be an integer from -1 on, not {budget!r}")
    if not isinstance(message, str) or len(message) > MAX_MESSAGE_CHARS:
        raise ConfigError(
            f"reasoning_budget_message must be a string of at most {MAX_MESSAGE_CHARS} characters"
        )


def check_drafts(settings: _Drafts) -> None:
    drafted, model = settings.max_draft_tokens, settings.draft_model
    if type(drafted) is not int or not 1 <= drafted <= MAX_DRAFT_TOKENS:
        text = f"max_draft_tokens must be an integer from 1 to {MAX_DRAFT_TOKENS}, not {drafted!r}"
        raise ConfigError(text)
    chosen = f"speculation {settings.speculation}"
    if settings.speculation in _WITH_DRAFT_MODEL:
        if model is None:
            raise ConfigError(f"{chosen} needs draft_model, a directory")
        check_folder("draft_model", model)
    if settings.speculation not in (*_WITH_DRAFT_MODEL, *DRAFT_HEADS):
        return
    for setting in ("memory_nodes", "kvp", "borrow"):
        if getattr(settings, setting):
            raise ConfigError(f"{chosen} needs all K/V on this machine: leave out {setting}")
    if getattr(settings, "converter", False):
        raise ConfigError(f"{chosen} needs a model of a known family: leave out converter")
    # a head reads states of all stages and shares products with all ranks, and its rows in the
    # model's pages would have to survive the loss of a rank
    for setting in ("tensor_parallel_size", "pipeline_parallel_size"):
        if settings.speculation in DRAFT_HEADS and getattr(settings, setting) != 1:
            raise ConfigError(f"{chosen} needs a model in one process: leave out {setting}")


def check_draft_use(speculation: str, draft_model: object) -> None:
    """Checks, when the model is loaded, that a draft model would be used."""
    if draft_model is not None and speculation not in _WITH_DRAFT_MODEL:
        names = " or ".join(_WITH_DRAFT_MODEL)
        raise ConfigError(f"draft_model needs speculation {names}, not {speculation}")


def check_for_states(settings: _Drafts, model_type: str, backend: str) -> None:
    """Raises ConfigError that names a setting that models whose layers have states cannot have.
    backend: the one that is used."""
    for setting in ("kvp", "borrow", "kv_peers", "kv_listen"):
        if getattr(settings, setting):
            raise ConfigError(
                f"{setting} cannot be used with {model_type}, whose layers have states, which stay"
                " on this machine"
            )
    if backend == "cuda" and getattr(settings, "memory_nodes", False):
        raise ConfigError(
            f"memory_nodes cannot be used with {model_type}, whose layers have states, on a GPU;"
            " use backend cpu"
        )
    speculation = settings.speculation
    if backend == "cuda" and speculation in (*_WITH_DRAFT_MODEL, *DRAFT_HEADS):
        raise ConfigError(
            f"speculation {speculation} cannot be used with {model_type}, whose layers have states,"
            " on a GPU; use lookup, which drafts nothing there, or backend cpu"
        )


def check_folders(kv_cache_dir: object, packed_cache: object, *, has_prefixes: bool) -> None:
    check_folder("packed_cache", packed_cache)
    if kv_cache_dir is not None:
        check_folder("kv_cache_dir", kv_cache_dir)
    if kv_cache_dir is not None and not has_prefixes:
        raise ConfigError("kv_cache_dir needs prefix_cache")


def check_folder(setting: str, folder: object) -> None:
    if not isinstance(folder, str | Path) or not str(folder) or "\0" in str(folder):
        raise ConfigError(f"{setting} must be a path, not {folder!r}")


def check_predictor(predictor: object, file: object, policy: str, names: tuple[str, ...]) -> None:
    if file is not None:
        check_folder("length_predictor_file", file)
        if predictor not in ("auto", "learned") or policy != "predicted":
            raise ConfigError(
                "length_predictor_file needs length_predictor learned and memory_policy predicted"
            )
    if isinstance(predictor, str):
        if predictor not in names:
            raise ConfigError(
                f"unknown length_predictor {predictor!r}; known: {', '.join(names)}, or an object"
            )
        return
    for method in ("quantile", "observe", "observe_cut"):
        if not callable(getattr(predictor, method, None)):
            raise ConfigError(f"length_predictor has no method {method}")
    if policy != "predicted":
        raise ConfigError("length_predictor needs memory_policy predicted")


def check_counts(settings: _Counts) -> None:
    """Checks the settings that are counts and sizes."""
    for name in (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_chunk_tokens",
        "max_num_waiting",
        "kv_cache_bytes",
        "kv_page_bytes",
        "kv_disk_bytes",
        "packed_cache_bytes",
        "weights_rate_bytes",
        "weight_memory_bytes",
        "host_weight_bytes",
        "memory_node_bytes",
        "kvp_segment_tokens",
        "lend_bytes",
        "kv_replica_bytes",
        "kv_offload_bytes",
        "tokenize_threads",
        "compute_threads",
        "tensor_parallel_size",
        "pipeline_parallel_size",
    ):
        value = getattr(settings, name)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} must be a positive integer, not {value!r}")
    most = settings.max_num_seqs
    if most > MAX_NUM_SEQS:
        raise ConfigError(f"max_num_seqs must be at most {MAX_NUM_SEQS}, not {most}")


class WeightMemoryOptions(TypedDict, total=False):
    """The fields of WeightMemorySettings as keyword arguments."""

    weight_memory_bytes: int | None
    host_weight_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMemorySettings:
    """How much memory weights take (serve.loading.streaming and serve.loading.host_weights).

    weight_memory_bytes: the most memory of all weights, of the device's with a GPU; what does not
        fit is read from the file of packed weights in every step, or is in host memory beside a
        GPU. None: all weights are in memory, or, where they do not fit into what is free, as many
        as fit.
    host_weight_bytes: the most host memory of weights beside a GPU; what does not fit is read from
        a file in every step. None: 90 % of what is free.
    """

    weight_memory_bytes: int | None = None
    host_weight_bytes: int | None = None


class WeightPeerOptions(WeightMemoryOptions, total=False):
    """The fields of WeightPeerSettings as keyword arguments."""

    weights_from: tuple[str, ...]
    weights_listen: str | None
    weights_key_file: str | Path | None
    weights_rate_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPeerSettings(WeightMemorySettings):
    """Where packed weights come from and go to, beside this machine's files (serve.weight_peers).

    weights_from: the addresses of replicas of this model that run, from whose memory the weights
        are pulled where no file of packed weights is here. Without weight files in the model's
        directory, which then needs config.json and the tokenizer, one of them has to be there.
    weights_listen: where this replica gives its packed weights to others; rank N of several listens
        at the port plus N. At shm://, replicas use the same memory.
    weights_key_file: a file with the secret that these replicas share; None: kv_peer_key_file.
    weights_rate_bytes: the most bytes a second that this replica gives; None: what the link takes.
    """

    weights_from: tuple[str, ...] = ()
    weights_listen: str | None = None
    weights_key_file: str | Path | None = None
    weights_rate_bytes: int | None = None

    def check_weight_peers(self, others: Mapping[str, object]) -> None:
        """Checks the settings, and makes the addresses a tuple. others: settings of which none can
        be used with them."""
        urls = checked_addresses("weights_from", self.weights_from, False)
        object.__setattr__(self, "weights_from", urls)
        for url in urls:
            check_address("weights_from", url)
        check_address("weights_listen", self.weights_listen)
        if self.weights_key_file is not None:
            check_folder("weights_key_file", self.weights_key_file)
        if not urls and self.weights_listen is None:
            return
        used = "weights_from" if urls else "weights_listen"
        for name, value in others.items():
            if value:
                raise ConfigError(f"{name} cannot be used with {used}: nothing is packed")


class KVPolicyOptions(WeightPeerOptions, total=False):
    """The fields of KVPolicySettings as keyword arguments."""

    kv_policy: str
    kv_offload_bytes: int | None
    kv_offload_dir: str | Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPolicySettings(WeightPeerSettings):
    """Which K/V of a sequence is read or kept (memory.policies).

    kv_policy: "off" reads and keeps all. "quest" keeps all and reads, for each decoded token, the
        pages that matter most to it; "window", "h2o", "snapkv", "keyformer" and "pyramid" drop the
        rest. The budget is a number of tokens or a share of the sequence, at least 128 tokens:
        quest:budget=1024, h2o:budget=25%. Answers change unless the budget is everything. Requests
        may have another budget, or none; where K/V is dropped, also another policy that drops some.
    kv_offload_bytes: K/V of running sequences that is on the disk beyond the kv_cache_bytes in
        memory, and is read when attention needs it. None: all of it is in memory.
    kv_offload_dir: the directory of the file, which has no name and ends with the process; None:
        the user's cache.
    """

    kv_policy: str = OFF
    kv_offload_bytes: int | None = None
    kv_offload_dir: str | Path | None = None

    @property
    def policy(self) -> KVPolicy | None:
        """What kv_policy says; None for "off"."""
        return parse_kv_policy(self.kv_policy)

    def check_kv_policy(self, num_ranks: int) -> None:
        """Checks the setting against the others of EngineConfig."""
        try:
            policy = self.policy
        except ValueError as error:
            raise ConfigError(f"kv_policy {error}") from None
        if policy is None:
            return
        for name in _WITHOUT_KV_POLICY:
            if getattr(self, name) and (policy.evicts or name != "memory_nodes"):
                raise ConfigError(f"{name} cannot be used with kv_policy {policy.name}")
        if num_ranks > 1:
            raise ConfigError(f"a model in several ranks cannot have kv_policy {policy.name}")
        drafts = getattr(self, "speculation", OFF)
        if policy.evicts and drafts not in ("lookup", OFF):  # lookup drafts nothing then
            raise ConfigError(f"speculation {drafts} cannot be used with kv_policy {policy.name}")

    def check_kv_offload(self, num_ranks: int) -> None:
        """Checks the settings against the others of EngineConfig."""
        if self.kv_offload_dir is not None:
            check_folder("kv_offload_dir", self.kv_offload_dir)
        if self.kv_offload_bytes is None:
            return
        for name in ("kv_cache_dir", *_WITHOUT_KV_POLICY):
            if getattr(self, name):
                raise ConfigError(f"{name} cannot be used with kv_offload_bytes")
        if num_ranks > 1:
            raise ConfigError("a model in several ranks cannot have kv_offload_bytes")
        drafts = getattr(self, "speculation", OFF)
        if drafts not in ("lookup", OFF):  # others have K/V of their own
            raise ConfigError(f"speculation {drafts} cannot be used with kv_offload_bytes")


class KVEventOptions(KVPolicyOptions, total=False):
    """The fields of KVEventSettings as keyword arguments."""

    kv_events: str | None
    kv_events_replay_endpoint: str | None
    kv_events_topic: str | None
    kv_events_format: str
    kv_events_salted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventSettings(KVPolicySettings):
    """What is published about the prefix cache, for routers (serve.events).

    kv_events: where events of cached token blocks are published over ZeroMQ, in vLLM's format, such
        as tcp://*:5557; with the name of a host, the server connects to it. None: nowhere.
    kv_events_replay_endpoint: where the whole index is asked for; None takes the next port.
    kv_events_topic: None takes kv@HOST@MODEL, as llm-d expects.
    kv_events_format: how an event is written: "array", as vLLM did first and its followers read, or
        "map", as it does in later versions.
    kv_events_salted: whether prompts with a cache salt, such as those of clients with keys that
        share no prefixes, are published as well, with their salts.
    """

    kv_events: str | None = None
    kv_events_replay_endpoint: str | None = None
    kv_events_topic: str | None = None
    kv_events_format: str = "array"
    kv_events_salted: bool = False

    def check_events(self, has_prefixes: bool, nodes: Collection[str]) -> None:
        check_flags(self, ("kv_events_salted",))
        check_choices(self, {"kv_events_format": KV_EVENT_FORMATS})
        names = ("kv_events", "kv_events_replay_endpoint", "kv_events_topic")
        check_texts(self, names)
        for name in names[:2]:
            check_endpoint(name, getattr(self, name))
        if self.kv_events is None:
            return
        if not has_prefixes:
            raise ConfigError("kv_events needs prefix_cache, whose pages it publishes")
        if nodes:
            raise ConfigError(
                "kv_events cannot be used with memory_nodes, where several caches hold pages"
            )
