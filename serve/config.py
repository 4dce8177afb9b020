"""Every setting of the engine, with its default and its check. Nothing here has side effects.

The defaults suit most uses; None means that the engine decides at start-up from the model and the
machine, and logs its decision.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Unpack

from quant.kv import GROUPS as KV_GROUPS
from serve import setting_checks
from serve.errors import ConfigError
from serve.length_predictor import LengthPredictor
from serve.node_addresses import check_nodes, check_peers
from serve.parser_names import REASONING_PARSERS, TOOL_PARSERS
from serve.setting_checks import (
    KVEventOptions,
    KVEventSettings,
    check_choices,
    check_counts,
    check_drafts,
    check_folders,
    check_predictor,
    check_texts,
    check_times,
)

DTYPES = ("auto", "float32", "bfloat16", "int8", "int4", "int4-searched", "nf4", "fp8")
KV_DTYPES = ("auto", "float32", "bfloat16", "int8", "int4")
PARTITIONS = ("auto", "head", "request", "sequence")  # as memory.nodes.placement, which has torch
MEMORY_POLICIES = ("predicted", "worst_case", "prompt_only")  # as in serve.scheduler.admission
LENGTH_PREDICTORS = ("auto", "learned", "history")
QUEUE_POLICIES = ("fcfs", "priority", "mlfq", "fair", "srpt")  # as in serve.scheduler
MEMORY_PREFILLS = ("local", "remote")
LOAD_FORMATS = ("safetensors", "random")
GROUP_EXCHANGES = ("auto", "host", "connections")
NODE_ENCRYPTIONS = ("auto", "on", "off")
MEMORY_WIRES = ("auto", "float32", "bfloat16", "int8")
WEIGHT_GROUPS = (16, 32, 64, 128)  # as the kernels have them; their module is slow to import
DEFAULT_MODEL = "default"
_DEFAULT_BATCHED_TOKENS = 256
_CHOICES = {
    "load_format": LOAD_FORMATS,
    "dtype": DTYPES,
    "weight_group": WEIGHT_GROUPS,
    "kv_dtype": KV_DTYPES,
    "kv_group": KV_GROUPS,
    "memory_policy": MEMORY_POLICIES,
    "order": QUEUE_POLICIES,
    "speculation": setting_checks.SPECULATIONS,
    "memory_partition": PARTITIONS,
    "memory_node_encryption": NODE_ENCRYPTIONS,
    "memory_prefill": MEMORY_PREFILLS,
    "memory_wire": MEMORY_WIRES,
    "group_exchange": GROUP_EXCHANGES,
    "tool_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
}
REASONING_BUDGET_MESSAGE = "I have to stop thinking here and answer with what I have so far."


def default_model_path() -> Path:
    """Returns the directory of the chat model that ships with the package."""
    return Path(__file__).parent / "default_model"


class EngineSettings(KVEventOptions, total=False):
    """The fields of EngineConfig but `model`, as keyword arguments of Engine and LLM."""

    tokenizer: str | Path | None
    load_format: str
    converter: bool
    served_model_name: str | None
    dtype: str
    weight_group: int
    packed_cache: str | Path
    packed_cache_bytes: int | None
    kv_dtype: str
    kv_group: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    max_chunk_tokens: int | None
    inter_token_slo_ms: float | None
    inter_token_factor: float
    max_num_waiting: int
    kv_cache_bytes: int | None
    kv_page_bytes: int | None
    prefix_cache: bool
    kv_cache_dir: str | Path | None
    kv_disk_bytes: int | None
    memory_policy: str
    length_predictor: str | LengthPredictor
    length_predictor_file: str | Path | None
    order: str
    speculation: str
    draft_model: str | Path | None
    max_draft_tokens: int
    ttft_slo: float | None
    memory_nodes: tuple[str, ...]
    memory_partition: str
    memory_node_bytes: int | None
    memory_node_key_file: str | Path | None
    memory_node_encryption: str
    memory_prefill: str
    memory_wire: str
    kvp: tuple[str, ...]
    kvp_segment_tokens: int
    borrow: tuple[str, ...]
    lend: str | None
    lend_bytes: int | None
    kv_peers: tuple[str, ...]
    kv_listen: str | None
    kv_peer_key_file: str | Path | None
    kv_replica_bytes: int | None
    tokenize_threads: int
    compute_threads: int | None
    tune: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    group_restart_s: float
    group_url: str | None
    group_key_file: str | Path | None
    group_exchange: str
    tool_parser: str
    reasoning_parser: str
    reasoning_budget: int | None
    reasoning_budget_message: str
    bounded_json: bool
    backend: str
    seed: int | None


@dataclass(frozen=True, slots=True)
class EngineConfig(KVEventSettings):
    """The settings of one engine. The base classes have those of events, of weights and of
    K/V policies.

    model: a Hugging Face directory, or "default" for the embedded model.
    tokenizer: a directory whose tokenizer and chat template take the place of the model's.
    load_format: "safetensors", or "random" to measure speed with random weights made on the
        device; then only config.json and the tokenizer are read from the directory.
    converter: serves the class of the installed transformers, exported as a graph, instead of the
        decoder of this project; for models that it does not know.
    served_model_name: the model's name in the API; None takes the directory's name.
    dtype: the type of the weights and products. "int8" multiplies int8 by int8 (weights scaled per
        channel, activations per token); "int4", "int4-searched" (with searched scales) and "nf4"
        round the weights to 4 bits; "fp8" multiplies e4m3 numbers on GPUs that support it. "auto"
        takes int8 for 16-bit checkpoints of the families that tolerate it, and logs the reason.
    weight_group: the number of inputs that share a scale in int4 and nf4: 16, 32, 64 or 128.
    packed_cache: where packed weights are kept between starts: "off", a directory, or "auto"
        (".mergestep" in the model's directory if that is writable, else the user's cache).
    packed_cache_bytes: the most that this directory holds; None: 64 GiB. The oldest files go first.
    kv_dtype: how K/V is stored. "auto" takes int8 with int8 products (bfloat16 where head_dim is
        not a multiple of 16), else the compute type. "int4" holds nearly twice as many tokens as
        int8, less exactly.
    kv_group: the largest number of values of a head that share a scale in int8 K/V, and up to 32
        in int4 K/V.
    max_model_len: the longest sequence (prompt and output) in tokens; None takes the model's.
    max_num_seqs: the most sequences that run at once.
    max_num_batched_tokens: the most rows of a step; None takes 256 (2,048 on a GPU), but at least
        max_num_seqs.
    max_chunk_tokens: the most prefill rows of one sequence in a step; None sets no limit
        beyond max_num_batched_tokens.
    inter_token_slo_ms: the longest a step may take while sequences decode; a learned model of
        step times sizes prefill chunks to keep it. None takes inter_token_factor.
    inter_token_factor: how many times as long as its decode rows alone a step may take while
        sequences decode; more when many prompts wait. Infinity lets prefill use the whole token
        budget; so does LLM by default, since its callers read whole answers.
    max_num_waiting: the most requests that wait; further ones are refused.
    kv_cache_bytes: the bound on physical K/V memory; None takes 40 % of the free memory, and on a
        GPU what the weights and the largest step leave, as measured.
    kv_page_bytes: the unit of physical memory that is mapped on demand; None takes about 16
        tokens, and on a GPU its unit (2 MiB).
    prefix_cache: whether computed K/V is kept and shared between requests with a common prefix.
    kv_cache_dir: the directory of the disk tier, which holds prefixes and preempted sequences that
        do not fit into memory; prefixes survive a restart.
    kv_disk_bytes: the most that the disk tier holds for one model, in all ranks; None: 16 GiB.
    memory_policy: which sequences K/V memory admits. "predicted" requires that the predicted peak
        fits; "worst_case" requires room for max_tokens of every sequence, so that none is
        preempted and few run; "prompt_only" requires room for the sequence's present tokens and
        for one more page of each running sequence.
    length_predictor: how "predicted" and "srpt" predict the lengths of answers: "learned" (from
        past answers, the prompt and the model's hidden state), "history" (from past answers),
        "auto" (learned for "srpt", else history), or, from Python only, an object that does.
    length_predictor_file: a file that keeps what "learned" has learned over restarts.
    order: the queue policy, which also picks the victims of preemption: "fcfs" (first come, first
        served), "priority" (the lower SamplingParams.priority first), "mlfq" (short requests do not
        wait for long ones), "fair" (every client gets its share) or "srpt" (the one with the
        shortest predicted rest first).
    speculation: what proposes tokens that a step computes ahead, which changes no answer: "lookup"
        (what followed the same words before, in the prompt, the answer or the client's other
        answers), that and one of "model" (what draft_model proposes), "mtp" (the checkpoint's head
        that predicts further tokens) or "eagle3" (a head in draft_model), or "off".
    draft_model: a small model with the same tokenizer, which shares the K/V memory, or a head.
    max_draft_tokens: the most of them in a sequence's step, up to 15; how many pay is learned.
    ttft_slo: seconds; a request whose first token is predicted to come later is refused at once.
    memory_nodes: the addresses of memory nodes that hold the K/V and compute attention over it
        (`serve node`); kv_cache_bytes of this machine are used only when no node is left.
    memory_partition: how K/V is divided between nodes: "head" (some heads of every sequence),
        "request" (whole sequences) or "sequence" (some tokens of every sequence, whose results
        are merged and do not have the bits of local K/V); "auto" is head or request.
    memory_node_bytes: the K/V memory of each node; None takes all that is free there.
    memory_node_key_file: a file with the secret that nodes and engines share.
    memory_node_encryption: whether tcp to nodes is encrypted, which both ends must agree on: "on",
        "off", or "auto" (on, unless the node is reached over the loopback interface).
    memory_prefill: where attention over a prompt is computed: "local" (on this machine, in its
        kv_cache_bytes, while the K/V moves to the nodes) or "remote" (on the nodes).
    memory_wire: the type of numbers sent to nodes: "float32", "bfloat16", "int8" (q and results in
        8 bits) or "auto" (the compute type, which loses nothing).
    kvp: the addresses of memory nodes onto which sequences grow that are longer than a segment;
        this machine has the first segment of each, the others go round the nodes. The results have
        the same bits with any number of nodes, also with none.
    kvp_segment_tokens: the tokens of a segment, a multiple of 128. Attention over longer sequences
        is the fold of its parts over segments, with kvp and without.
    borrow: the addresses of replicas that lend K/V memory: a sequence for which this machine has
        none is there, with the same results. They may be absent.
    lend: where this replica lends K/V memory that its own sequences do not need; they get it back.
    lend_bytes: the most that is lent; None takes half of the K/V memory.
    kv_peers: the addresses of engines with this model from which cached K/V is pulled, where that
        is predicted to be faster than computing. They may be absent, and this engine among them;
        "tcp://*" stands for those that requests name in kv_transfer_params.
    kv_listen: where other engines pull this one's cached K/V.
    kv_peer_key_file: a file with the secret that these engines share.
    kv_replica_bytes: memory for copies of the K/V of the peers' running sequences, so that these
        can go on when their engine dies. None: none are kept.
    tokenize_threads: the number of threads that tokenize.
    compute_threads: the number of cores that compute; None takes all that the affinity mask and
        the cgroup's quota allow.
    tune: whether the first start on a GPU measures which kernel is fastest for each product.
    tensor_parallel_size: the number of processes that divide every layer's products and heads.
    pipeline_parallel_size: the number of stages into which the layers are divided. The engine
        starts the other processes of tensor_parallel_size * pipeline_parallel_size; results are the
        same to the last bit on any number of them.
    group_restart_s: how long requests wait for a lost process to be replaced, in seconds.
    group_url: where rank 0 listens if others start the processes; None: after MASTER_PORT.
    group_key_file: a file with the secret that the processes of several machines share.
    group_exchange: "auto" (a machine's GPUs directly, else shared memory), "host", "connections".
    tool_parser: the format in which the model writes tool calls: "hermes", "llama3_json",
        "mistral", "none" (tools are refused), or "auto" (decided by its chat template).
    reasoning_parser: the format in which the model marks its reasoning: "deepseek_r1" (<think>),
        "none", or "auto" (decided by its chat template).
    reasoning_budget: the most tokens of reasoning in a chat that does not say; 0: no reasoning;
        None and -1: no bound.
    reasoning_budget_message: the sentence that a model is made to think last when its reasoning
        has reached the bound; "" for none.
    bounded_json: whether structured output has only properties that its schema names, numbers that
        an int64 or a double holds, and an end before max_tokens run out; requests may say
        otherwise.
    backend: a name in ops.BACKENDS, or "auto": "cuda" where torch has a GPU, else "cpu".
    seed: the base of the seeds of requests without one; None draws it at random.
    """

    model: str = DEFAULT_MODEL
    tokenizer: str | Path | None = None
    load_format: str = "safetensors"
    converter: bool = False
    served_model_name: str | None = None
    dtype: str = "auto"
    weight_group: int = 64
    packed_cache: str | Path = "auto"
    packed_cache_bytes: int | None = None
    kv_dtype: str = "auto"
    kv_group: int = 64
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_chunk_tokens: int | None = None
    inter_token_slo_ms: float | None = None
    inter_token_factor: float = 3.0
    max_num_waiting: int = 4096
    kv_cache_bytes: int | None = None
    kv_page_bytes: int | None = None
    prefix_cache: bool = True
    kv_cache_dir: str | Path | None = None
    kv_disk_bytes: int | None = None
    memory_policy: str = "predicted"
    length_predictor: str | LengthPredictor = "auto"
    length_predictor_file: str | Path | None = None
    order: str = "fcfs"
    speculation: str = "lookup"
    draft_model: str | Path | None = None
    max_draft_tokens: int = 15
    ttft_slo: float | None = None
    memory_nodes: tuple[str, ...] = ()
    memory_partition: str = "auto"
    memory_node_bytes: int | None = None
    memory_node_key_file: str | Path | None = None
    memory_node_encryption: str = "auto"
    memory_prefill: str = "local"
    memory_wire: str = "auto"
    kvp: tuple[str, ...] = ()
    kvp_segment_tokens: int = 1 << 20
    borrow: tuple[str, ...] = ()
    lend: str | None = None
    lend_bytes: int | None = None
    kv_peers: tuple[str, ...] = ()
    kv_listen: str | None = None
    kv_peer_key_file: str | Path | None = None
    kv_replica_bytes: int | None = None
    tokenize_threads: int = 2
    compute_threads: int | None = None
    tune: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    group_restart_s: float = 120.0
    group_url: str | None = None
    group_key_file: str | Path | None = None
    group_exchange: str = "auto"
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    reasoning_budget: int | None = None
    reasoning_budget_message: str = REASONING_BUDGET_MESSAGE
    bounded_json: bool = True
    backend: str = "auto"
    seed: int | None = None

    def __post_init__(self) -> None:
        check_texts(self, ("model", "served_model_name"))
        check_choices(self, _CHOICES)
        check_counts(self)
        setting_checks.check_flags(self, ("converter", "prefix_cache", "tune", "bounded_json"))
        check_times(
            self.inter_token_slo_ms, self.inter_token_factor, self.group_restart_s, self.ttft_slo
        )
        if self.seed is not None and type(self.seed) is not int:
            raise ConfigError(f"seed must be an integer, not {self.seed!r}")
        check_predictor(
            self.length_predictor, self.length_predictor_file, self.memory_policy, LENGTH_PREDICTORS
        )
        if self.tokenizer is not None:
            setting_checks.check_folder("tokenizer", self.tokenizer)
        check_drafts(self)
        setting_checks.check_reasoning(self.reasoning_budget, self.reasoning_budget_message)
        check_folders(self.kv_cache_dir, self.packed_cache, has_prefixes=self.prefix_cache)
        check_nodes(self)
        check_peers(self)
        is_random = self.load_format == "random"
        self.check_weight_peers({"converter": self.converter, "load_format random": is_random})
        self.check_kv_policy(self.num_ranks)
        self.check_kv_offload(self.num_ranks)
        self.check_events(self.prefix_cache, self.memory_nodes)
        page = self.kv_page_bytes
        if page is not None and page % 4096:
            raise ConfigError(f"kv_page_bytes must be a multiple of 4096, not {page}")

    @property
    def holders(self) -> tuple[str, ...]:
        """The addresses of memory on which parts of sequences may be."""
        return self.kvp or self.borrow

    @property
    def batched_tokens(self) -> int:
        """The most rows of a step."""
        return self.max_num_batched_tokens or max(_DEFAULT_BATCHED_TOKENS, self.max_num_seqs)

    @property
    def num_ranks(self) -> int:
        """The processes that hold the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def chunk_tokens(self) -> int:
        """The most rows of one sequence in a step."""
        return min(self.max_chunk_tokens or self.batched_tokens, self.batched_tokens)

    @property
    def inter_token_slo_s(self) -> float | None:
        return None if self.inter_token_slo_ms is None else self.inter_token_slo_ms / 1e3

    @property
    def model_path(self) -> Path:
        return default_model_path() if self.model == DEFAULT_MODEL else Path(self.model)

    @property
    def tokenizer_path(self) -> Path:
        """The directory of the tokenizer and the chat template."""
        return self.model_path if self.tokenizer is None else Path(self.tokenizer).expanduser()

    @property
    def model_name(self) -> str:
        if self.served_model_name is not None:
            return self.served_model_name
        return "mergestep-default" if self.model == DEFAULT_MODEL else self.model_path.name

    @classmethod
    def from_settings(
        cls, model: str | Path | None = None, **settings: Unpack[EngineSettings]
    ) -> EngineConfig:
        """Returns the configuration; ConfigError for an unknown setting names the known ones."""
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(
                f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(DEFAULT_MODEL if model is None else str(model), **settings)
