"""Every setting of the engine, with its default and its check. No side effects.

The defaults are meant to be the best choice for most people; None means "decide at start-up
from the model and the machine" (the engine logs what it decided).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from quant.kv import GROUPS as KV_GROUPS
from serve.errors import ConfigError
from serve.scheduler.length_predictor import LengthPredictor

DTYPES = ("auto", "float32", "bfloat16", "int8", "int4", "nf4", "fp8")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8")
PARTITIONS = ("auto", "head", "request", "sequence")  # of memory.nodes.placement, which needs torch
MEMORY_POLICIES = ("predicted", "worst_case", "prompt_only")  # of serve.scheduler.admission
ORDERS = ("fcfs", "priority", "mlfq", "fair")  # of serve.scheduler.orders
TOOL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "none")
REASONING_PARSERS = (
    "auto",
    "deepseek_r1",
    "none",
)  # of serve.text.chat_parser
MEMORY_PREFILLS = ("local", "remote")
LOAD_FORMATS = ("safetensors", "random")
MEMORY_WIRES = ("auto", "float32", "bfloat16", "int8")
WEIGHT_GROUPS = (32, 64, 128)  # those of the kernels, whose module is slow to import
DEFAULT_MODEL = "default"
_DEFAULT_BATCHED_TOKENS = 256
MAX_NUM_SEQS = 1 << 20  # each has a range of addresses


def default_model_path() -> Path:
    """The embedded chat model that ships with the package."""
    return Path(__file__).parent / "default_model"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    model: a Hugging Face directory, or "default" for the embedded model.
    load_format: "safetensors", or "random": weights made at random on the device, for measuring
        speed; of the directory only config.json and the tokenizer are read.
    served_model_name: the name clients use; None takes the directory's name.
    dtype: "int8" multiplies int8 by int8 (weights per channel, activations per token); "auto"
        takes it for 16-bit checkpoints of families that bear it, and logs why. "int4" and "nf4"
        round the weights to 4 bits; "fp8" multiplies e4m3 numbers, on GPUs that have them.
    weight_group: inputs of an output that share one scale in int4 and nf4: 32, 64 or 128.
    kv_dtype: how K/V is stored; "auto" takes int8 with int8 products (bfloat16 where head_dim is
        no multiple of 16), else the compute type.
    kv_group: values of a head that share one scale in int8 K/V, at most.
    max_model_len: longest sequence (prompt + output) in tokens; None takes the model's.
    max_num_seqs: sequences that run at once.
    max_num_batched_tokens: rows of one step; None takes 256, on a GPU 2,048, and at least
        max_num_seqs.
    max_chunk_tokens: most prefill rows of one sequence in one step; None means no limit
        beyond max_num_batched_tokens.
    inter_token_slo_ms: what a step may take while somebody decodes: prompts are cut so that it
        is kept, by a learned model of the step's time. None: prompts take the whole budget.
    max_num_waiting: requests that may wait before new ones are refused.
    kv_cache_bytes: bound on physical K/V memory; None takes 40 % of what is free, on a GPU what
        is left beside the weights and the largest step, as measured.
    kv_page_bytes: physical unit mapped on demand; None picks about 16 tokens, on a GPU its unit
        (2 MiB).
    prefix_cache: keep what is computed and share it between requests that begin alike.
    kv_cache_dir: a directory for prefixes and preempted sequences that memory has no room for;
        prefixes survive a restart. kv_disk_bytes: used for one model at most; None: 16 GiB.
    memory_policy: whom K/V memory lets in: "predicted" (the predicted peak fits), "worst_case"
        (max_tokens of everyone fits: no preemption, few sequences) or "prompt_only" (grow
        greedily).
    length_predictor: an object that predicts answers' lengths for "predicted" (the methods of
        serve.scheduler.length_predictor.LengthPredictor), in Python only; None learns from past
        answers.
    order: who is next and who gives way: "fcfs" (first come, first served), "priority" (the
        request's, a lower one first), "mlfq" (short requests do not wait for long ones) or
        "fair" (every client gets its share).
    ttft_slo: seconds; a request whose first token is predicted to come later is refused at once.
    memory_nodes: addresses of memory nodes that hold the K/V and attend over it (`serve node`);
        kv_cache_bytes of this machine's memory are used only when none is left.
    memory_partition: what a node gets: "head" (some heads of everything), "request" (whole
        sequences) or "sequence" (some tokens of everything); "auto" picks by their number.
    memory_node_bytes: K/V on each node; None takes all that is free there.
    memory_node_key_file: a file with the secret that nodes and engines share.
    memory_prefill: who attends over a prompt while it is computed: "local" (this machine, in
        kv_cache_bytes of its own memory; the K/V moves to the nodes meanwhile) or "remote".
    memory_wire: numbers on the way: "float32", "bfloat16", "int8" (q and results in 8 bits) or
        "auto" (as the model computes).
    tokenize_threads: size of pool 1. compute_threads: cores of pool 2; None takes
        all that affinity and the cgroup's quota leave.
    tune: measure on a GPU, at the first start, which of several ways each product takes.
    tool_parser: the format that the model writes calls of tools in: "hermes", "llama3_json",
        "mistral", "none" (tools are refused), or "auto": by its chat template.
    reasoning_parser: what it writes around its reasoning: "deepseek_r1" (<think>), "none", or
        "auto": by its chat template.
    backend: name in ops.BACKENDS, or "auto": "cuda" where torch has a GPU, else "cpu".
    seed: base for requests that bring no seed; None draws one.
    """

    model: str = DEFAULT_MODEL
    load_format: str = "safetensors"
    served_model_name: str | None = None
    dtype: str = "auto"
    weight_group: int = 64
    kv_dtype: str = "auto"
    kv_group: int = 64
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_chunk_tokens: int | None = None
    inter_token_slo_ms: float | None = None
    max_num_waiting: int = 4096
    kv_cache_bytes: int | None = None
    kv_page_bytes: int | None = None
    prefix_cache: bool = True
    kv_cache_dir: str | Path | None = None
    kv_disk_bytes: int | None = None
    memory_policy: str = "predicted"
    length_predictor: LengthPredictor | None = None
    order: str = "fcfs"
    ttft_slo: float | None = None
    memory_nodes: tuple[str, ...] = ()
    memory_partition: str = "auto"
    memory_node_bytes: int | None = None
    memory_node_key_file: str | Path | None = None
    memory_prefill: str = "local"
    memory_wire: str = "auto"
    tokenize_threads: int = 2
    compute_threads: int | None = None
    tune: bool = True
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    backend: str = "auto"
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check_names()
        self._check_counts()
        for name in ("prefix_cache", "tune"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}")
        slo = self.inter_token_slo_ms
        if slo is not None and (type(slo) not in (int, float) or not 0 < slo < math.inf):
            raise ConfigError(f"inter_token_slo_ms must be a positive number, not {slo!r}")
        if self.seed is not None and type(self.seed) is not int:
            raise ConfigError(f"seed must be an integer, not {self.seed!r}")
        slo = self.ttft_slo
        if slo is not None and (type(slo) not in (int, float) or not 0 < slo < math.inf):
            raise ConfigError(f"ttft_slo must be a positive number of seconds, not {slo!r}")
        predictor = self.length_predictor
        if predictor is not None:
            for method in ("quantile", "observe", "observe_cut"):
                if not callable(getattr(predictor, method, None)):
                    raise ConfigError(f"length_predictor has no method {method}")
            if self.memory_policy != "predicted":
                raise ConfigError("length_predictor needs memory_policy predicted")
        self._check_store()
        self._check_nodes()
        page = self.kv_page_bytes
        if page is not None and page % 4096:
            raise ConfigError(f"kv_page_bytes must be a multiple of 4096, not {page}")

    def _check_names(self) -> None:
        for setting in ("model", "served_model_name"):
            name = getattr(self, setting)
            if name is not None and (not isinstance(name, str) or not name):
                raise ConfigError(f"{setting} must be a name that is not empty, not {name!r}")
        for setting, known in (
            ("load_format", LOAD_FORMATS),
            ("dtype", DTYPES),
            ("kv_dtype", KV_DTYPES),
            ("memory_policy", MEMORY_POLICIES),
            ("order", ORDERS),
            ("memory_partition", PARTITIONS),
            ("memory_prefill", MEMORY_PREFILLS),
            ("memory_wire", MEMORY_WIRES),
            ("tool_parser", TOOL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            if getattr(self, setting) not in known:
                names = ", ".join(known)
                raise ConfigError(
                    f"{setting} must be one of {names}, not {getattr(self, setting)!r}"
                )
        for setting, groups in (("weight_group", WEIGHT_GROUPS), ("kv_group", KV_GROUPS)):
            group = getattr(self, setting)
            if type(group) is not int or group not in groups:
                names = ", ".join(map(str, groups))
                raise ConfigError(f"{setting} must be one of {names}, not {group!r}")

    def _check_counts(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_chunk_tokens",
            "max_num_waiting",
            "kv_cache_bytes",
            "kv_page_bytes",
            "kv_disk_bytes",
            "memory_node_bytes",
            "tokenize_threads",
            "compute_threads",
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a positive integer, not {value!r}")
        if self.max_num_seqs > MAX_NUM_SEQS:
            raise ConfigError(
                f"max_num_seqs must be at most {MAX_NUM_SEQS}, not {self.max_num_seqs}"
            )

    def _check_store(self) -> None:
        if self.kv_cache_dir is not None and (
            not isinstance(self.kv_cache_dir, str | Path) or not str(self.kv_cache_dir)
        ):
            raise ConfigError(f"kv_cache_dir must be a path, not {self.kv_cache_dir!r}")
        if self.kv_cache_dir is not None and not self.prefix_cache:
            raise ConfigError("kv_cache_dir needs prefix_cache")

    def _check_nodes(self) -> None:
        nodes = self.memory_nodes
        if isinstance(nodes, str):  # as the command line gives them
            nodes = tuple(url.strip() for url in nodes.split(",") if url.strip())
            if not nodes:
                raise ConfigError("memory_nodes: no address")
            object.__setattr__(self, "memory_nodes", nodes)
        if not isinstance(nodes, tuple | list) or not all(isinstance(url, str) for url in nodes):
            raise ConfigError(f"memory_nodes must be addresses, not {nodes!r}")
        object.__setattr__(self, "memory_nodes", tuple(nodes))
        if len(set(nodes)) < len(nodes):
            raise ConfigError("memory_nodes: an address is there twice")
        for name in ("kv_cache_dir", "kv_page_bytes") if nodes else ():
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} cannot be used with memory_nodes")

    @property
    def batched_tokens(self) -> int:
        """Rows of a step, at most."""
        return self.max_num_batched_tokens or max(_DEFAULT_BATCHED_TOKENS, self.max_num_seqs)

    @property
    def chunk_tokens(self) -> int:
        """Rows of one sequence in a step, at most."""
        return min(self.max_chunk_tokens or self.batched_tokens, self.batched_tokens)

    @property
    def inter_token_slo_s(self) -> float | None:
        return None if self.inter_token_slo_ms is None else self.inter_token_slo_ms / 1e3

    @property
    def model_path(self) -> Path:
        return default_model_path() if self.model == DEFAULT_MODEL else Path(self.model)

    @property
    def model_name(self) -> str:
        if self.served_model_name is not None:
            return self.served_model_name
        return "mergestep-default" if self.model == DEFAULT_MODEL else self.model_path.name

    @classmethod
    def from_settings(cls, model: str | Path | None = None, **settings: object) -> EngineConfig:
        """Build from keyword settings; an unknown one raises and names the known ones."""
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(
                f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        if model is not None:
            settings["model"] = str(model)
        return cls(**settings)  # type: ignore[arg-type]
