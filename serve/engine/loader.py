"""Builds a core that is ready to start from an EngineConfig: read, size, load, connect.

Start-up decisions (dtype, context length, pages, threads) are taken here and in serve.loading, and
logged once.
"""

from __future__ import annotations

import functools
import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memory.kv_memory import KVMemory
from memory.prefix.block_recorder import BlockRecorder
from memory.prefix.cache import PrefixCache
from memory.prefix.index import PrefixHasher
from serve.config import EngineConfig
from serve.engine.chat_prompt import reasoning_end
from serve.engine.core import EngineCore
from serve.engine.node_recovery import MakeRecovery, NodeRecovery
from serve.engine.pools import ComputeThread
from serve.engine.request_limits import RequestLimits
from serve.engine.text_loader import LoadedText, TextLoading, check_same_ids
from serve.errors import EngineStoppedError, ModelLoadError, RequestError
from serve.loading.draft_model import DraftWeights, draft_path, load_draft_weights
from serve.loading.precision import Precision, choose_backend
from serve.loading.runtime import Runtime, load_runtime
from serve.models import ModelSpec, read_generation_defaults, read_spec
from serve.models.progress import LoadProgress
from serve.prediction.hidden_reader import HiddenReader
from serve.prediction.saved import PredictorFile
from serve.prediction.start import start_prediction
from serve.read_ahead import records_folder
from serve.runner.runner import Closable, Follower, ModelRunner
from serve.sampling_params import SamplingParams
from serve.scheduler.admission import make_policy
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.step_plan import SchedulerLimits
from serve.scheduler.waiting_queue import make_queue
from serve.setting_checks import check_draft_use
from serve.speculation import make_drafting, make_head_drafts, use_drafting
from serve.text.chat_template import ChatTemplate
from serve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from memory.offload.residency import Residency
    from memory.policies.selection import Selection
    from serve.events.publisher import EventPublisher
    from serve.loading.host_weights.cache import HostWeights
    from serve.loading.streaming.stream import WeightStream
    from serve.weight_peers.peers import WeightPeers

logger = logging.getLogger(__name__)

_CHECK_S = 0.1  # how often a wait for the tokenizer looks whether loading was stopped
GPU_BATCHED_TOKENS = 2048  # rows of a step: enough for the products to reach the device's limit


@dataclass(slots=True)
class LoadedEngine:
    """A core that is ready to start, and what its interfaces need to know.

    chat_problem: why no chat can be rendered, None if one can; known a little later than the rest,
    and None for a scripted runner. precision and kv are None for a scripted runner.
    """

    core: EngineCore
    spec: ModelSpec
    tokenizer: Tokenizer
    limits: RequestLimits
    generation_defaults: dict[str, object]
    template: ChatTemplate | None = None
    chat_problem: Future[str | None] | None = None
    precision: Precision | None = None
    kv: KVMemory | None = None
    use_peer: Callable[[str], None] | None = None
    peer_ids: Mapping[str, str] = field(default_factory=dict)
    weight_peers: WeightPeers | None = None
    selection: Selection | None = None
    weight_stream: WeightStream | HostWeights | None = None
    offload: Residency | None = None
    lender: Closable | None = None
    lengths_file: PredictorFile | None = None
    recorder: BlockRecorder | None = None
    events: EventPublisher | None = None

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    def close(self) -> None:
        """Stops the core and frees all memory. It blocks until that is done. Idempotent."""
        self.tokenizer.close()
        if self.lender is not None:
            self.lender.close()
        self.core.shutdown()
        if self.events is not None:  # after the core, which drops all pages last
            self.events.close()
        if self.lengths_file is not None:
            self.lengths_file.close()
        if self.template is not None:
            self.template.close()


@dataclass(frozen=True, slots=True)
class Parts:
    """Classes of an engine's parts, which measurements may replace."""

    core: Callable[..., EngineCore] = EngineCore
    scheduler: Callable[..., Scheduler] = Scheduler


def load_engine(
    config: EngineConfig, *, progress: bool = False, parts: Parts | None = None
) -> LoadedEngine:
    """Loads the model and builds the core, which is not started. Raises ModelLoadError and
    ConfigError."""
    compute = ComputeThread()
    made_of, is_stopped = parts or Parts(), threading.Event()
    try:
        loaded = compute.submit(
            lambda: _load(config, compute, made_of, progress, is_stopped)
        ).result()
        if config.lend is not None:
            _open_lender(config, loaded)
        if config.kv_events is not None:
            _open_events(config, loaded)
        return loaded
    except BaseException:
        is_stopped.set()
        compute.stop()
        raise


def _load(
    config: EngineConfig,
    compute: ComputeThread,
    parts: Parts,
    progress: bool,
    is_stopped: threading.Event,
) -> LoadedEngine:
    """Runs in the compute thread, because packing weights is parallel work."""
    path = config.model_path
    # errors in the directory itself are reported before anything else
    if config.converter:
        config = replace(config, backend="cpu" if config.backend == "auto" else config.backend)
    else:
        config = _with_device_defaults(config, read_spec(path))
    defaults = _generation_defaults(path, config.converter)
    text, weights, runtime, make_recovery = _load_parts(config, progress, is_stopped)
    tokenizer = text.tokenizer
    spec, kv = runtime.spec, runtime.kv
    batched = config.batched_tokens
    prediction = start_prediction(config, spec.hidden_size, _shape_of(spec))
    draft = None if weights is None else weights.with_kv(config, kv)
    runner, head = runtime.runner, make_head_drafts(config, runtime)
    if runner is None:
        runner = _local_runner(runtime, prediction.reader, head)
    limits = _limits_of(config, runtime, tokenizer)
    scheduler = _scheduler_of(config, parts, runtime)(
        SchedulerLimits.of(config),
        kv,
        make_policy(config.memory_policy, kv, batched, prediction.predictor),
        PrefixHasher(kv.page_end, runtime.prefix_secret) if config.prefix_cache else None,
        make_queue(config.order),
    )
    use_drafting(scheduler, make_drafting(config, scheduler, runtime, draft, head))
    scheduler.prefixes.names = runtime.names
    core = parts.core(
        runner=runner,
        scheduler=scheduler,
        kv=kv,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(_eos(defaults, spec, tokenizer)),
        limits=limits,
        compute=compute,
        make_recovery=make_recovery,
        tokenize_threads=config.tokenize_threads,
        seed=secrets.randbits(62) if config.seed is None else config.seed,
    )
    logger.info("up to %d sequences and %d rows a step", config.max_num_seqs, batched)
    return LoadedEngine(
        core,
        spec,
        tokenizer,
        limits,
        defaults,
        text.template,
        text.chat_problem,
        runtime.precision,
        runtime.kv,
        use_peer=runtime.use_peer,
        peer_ids=runtime.peer_ids,
        weight_peers=runtime.weight_peers,
        selection=runtime.selection,
        weight_stream=runtime.weight_stream,
        offload=runtime.offload,
        lengths_file=prediction.file,
        recorder=_record_blocks(config, scheduler),
    )


def _scheduler_of(config: EngineConfig, parts: Parts, runtime: Runtime) -> Callable[..., Scheduler]:
    """Returns what makes the scheduler."""
    if config.policy is None or not config.policy.evicts:
        return parts.scheduler
    from memory.attention.evicting import EvictingAttention  # only policies need them
    from serve.eviction.scheduler import EvictingScheduler

    assert isinstance(runtime.attention, EvictingAttention)
    return functools.partial(EvictingScheduler, eviction=runtime.attention)


def _limits_of(config: EngineConfig, runtime: Runtime, tokenizer: Tokenizer) -> RequestLimits:
    return RequestLimits(
        runtime.kv.max_model_len,
        runtime.spec.vocab_size,
        config.max_num_waiting,
        config.max_num_seqs,
        config.ttft_slo,
        runtime.spec.embed_size,
        bounded_json=config.bounded_json,
        reasoning=reasoning_end(tokenizer, config),
        kv_policy=config.policy,
    )


def _local_runner(
    runtime: Runtime, states: HiddenReader | None, follower: Follower | None
) -> ModelRunner:
    return ModelRunner(
        runtime.model,
        runtime.kv,
        runtime.attention,
        memory=runtime.memory,
        states=states,
        follower=follower,
        selects=runtime.selection is not None,
    )


def _shape_of(spec: ModelSpec) -> str:
    """Returns what distinguishes models whose hidden states are not comparable."""
    return f"{spec.num_layers} layers of {spec.hidden_size}, {spec.vocab_size} tokens"


def _open_lender(config: EngineConfig, loaded: LoadedEngine) -> None:
    from serve.loading.lending import open_lender  # only lenders need it

    try:
        core = loaded.core
        loaded.lender = lender = open_lender(config, core.kv, core.run_in_loop)
        core.watchdog.on_round = lender.node.note_step
    except BaseException:
        loaded.close()
        raise


def _record_blocks(config: EngineConfig, scheduler: Scheduler) -> BlockRecorder | None:
    if config.kv_events is None:
        return None
    prefixes = scheduler.kv.prefixes
    assert isinstance(prefixes, PrefixCache), "checked with the settings"
    recorder = BlockRecorder(scheduler.kv.layout, with_salted=config.kv_events_salted)
    scheduler.prefixes.recorder = prefixes.index.listener = recorder
    return recorder


def _open_events(config: EngineConfig, loaded: LoadedEngine) -> None:
    from serve.events.start import open_events  # only this needs ZeroMQ

    assert loaded.recorder is not None
    try:
        loaded.events = open_events(config, loaded.recorder)
        loaded.events.start()
    except BaseException:
        loaded.close()
        raise


def _load_parts(
    config: EngineConfig, progress: bool, is_stopped: threading.Event
) -> tuple[LoadedText, DraftWeights | None, Runtime, MakeRecovery | None]:
    """Loads tokenizer and weights beside one another. A wrong tokenizer and is_stopped end both."""
    records = records_folder(config.packed_cache)
    text = TextLoading(config.tokenizer_path, config.model_path, kept=records)

    def check() -> None:
        text.check()
        if is_stopped.is_set():
            raise EngineStoppedError("the model's loading was stopped")

    def wait() -> LoadedText:
        while not text.is_done(_CHECK_S):  # the trial of a tokenizer may take a minute
            check()
        return text.result()

    draft: DraftWeights | None = None
    try:
        check_draft_use(config.speculation, config.draft_model)
        if config.speculation == "model":
            check_same_ids(config.tokenizer_path, wait().tokenizer, draft_path(config))
            draft = load_draft_weights(config, LoadProgress(progress, check=check, poll=check))
        runtime, make_recovery = _load_weights(
            config, LoadProgress(progress, check=check, finish=wait, poll=check), draft
        )
    except BaseException:
        text.discard()
        raise
    return text.result(), draft, runtime, make_recovery


def _load_weights(
    config: EngineConfig, progress: LoadProgress, draft: DraftWeights | None
) -> tuple[Runtime, MakeRecovery | None]:
    """Loads the model. draft: what is loaded beside it, with which it shares memory."""
    kv_share = 1.0 if draft is None else 1.0 - draft.kv_share
    if config.num_ranks == 1:
        device = None if draft is None else draft.device
        runtime = load_runtime(config, progress, kv_share=kv_share, device=device)
        if runtime.nodes is None:
            return runtime, None
        return runtime, functools.partial(NodeRecovery, runtime.nodes, runtime.kv.partitions)
    from serve.group.start import start_group  # only a group needs it

    group = start_group(config, progress, kv_share)
    runtime = group.runtime
    if runtime.nodes is None:
        return runtime, group.make_recovery
    make_nodes = functools.partial(NodeRecovery, runtime.nodes, runtime.kv.partitions)
    return runtime, functools.partial(group.make_recovery, make_nodes)


def _with_device_defaults(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Fills in settings whose best value depends on the device."""
    backend = choose_backend(config, spec)
    config = replace(config, backend=backend)
    is_gpu = backend == "cuda" and torch.cuda.is_available()
    if config.max_num_batched_tokens is not None or not is_gpu:
        return config
    return replace(config, max_num_batched_tokens=max(GPU_BATCHED_TOKENS, config.max_num_seqs))


def _generation_defaults(path: Path, is_converted: bool) -> dict[str, object]:
    """Returns the defaults in generation_config.json, checked like a request's parameters."""
    defaults = dict(read_generation_defaults(path, is_converted=is_converted))
    sampling: dict[str, Any] = {k: v for k, v in defaults.items() if k != "eos_token_ids"}
    try:
        SamplingParams(**sampling)
    except RequestError as error:
        raise ModelLoadError(f"{path / 'generation_config.json'}: {error}") from error
    return defaults


def _eos(defaults: dict[str, object], spec: ModelSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns all ids that end an answer. That of the tokenizer is one of them, as in vLLM: some
    files name the end of a turn only there."""
    found = defaults.get("eos_token_ids") or spec.eos_token_ids
    assert isinstance(found, tuple)
    if tokenizer.eos_token_id is not None:
        found = (*found, tokenizer.eos_token_id)
    return tuple(token for token in found if token < spec.vocab_size)
