"""Loads a draft model: a second, small model in this process, whose K/V is memory of its own.

Both models divide the K/V memory by the bytes of a token, so that as many tokens of either fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from memory.kv_memory import KVMemory
from memory.pages.layer_groups import kept_bytes
from memory.policies.setting import OFF
from serve.config import DEFAULT_MODEL, EngineConfig, default_model_path
from serve.errors import ConfigError
from serve.loading.footprint import check_weights_fit
from serve.loading.kv_layouts import device_layout, expected_groups
from serve.loading.model_source import ModelSource, load_weights, read_source
from serve.loading.precision import Precision, choose_backend, resolve_precision
from serve.loading.runtime import Runtime, load_local, log_sizes
from serve.machine import local_kv_bytes
from serve.models import Decoder, ModelSpec, StepModel, read_spec
from serve.models.progress import LoadProgress
from serve.runner.forward import Forward, HostForward
from serve.runner.graph_shapes import StepShapes
from serve.runner.step_device import StepDevice


class LoadedDraft(NamedTuple):
    """A draft model, and what computes its steps."""

    runtime: Runtime
    compute: Forward


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A draft model without K/V memory. kv_share: the part of the K/V memory that it gets. device:
    the GPU's queue, which its target shares; None on this machine's processors."""

    source: ModelSource
    model: StepModel
    kv_share: float
    device: StepDevice | None = None

    def with_kv(self, config: EngineConfig, target: KVMemory) -> LoadedDraft:
        """Reserves its K/V. config: the engine's; target: the model's K/V. If memory holds fewer
        tokens than its longest context, that is lowered: longer sequences have no drafts."""
        own, spec, precision, backend, *_ = self.source
        spec = replace(spec, max_model_len=own.max_model_len or spec.max_model_len)
        own = replace(own, max_model_len=None)
        if self.device is not None:
            num_bytes = target.num_pages * target.page_bytes
            num_bytes = int(num_bytes * self.kv_share / (1.0 - self.kv_share))
            assert isinstance(self.model, Decoder), "the converter has no device"
            return _on_device(own, spec, precision, self.model, self.device, num_bytes)
        num_bytes = max(1, int((config.kv_cache_bytes or local_kv_bytes()) * self.kv_share))
        runtime = load_local(own, spec, precision, self.model, backend, num_bytes)
        return LoadedDraft(runtime, HostForward(self.model, runtime.attention))


def _on_device(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    model: Decoder,
    device: StepDevice,
    kv_bytes: int,
) -> LoadedDraft:
    """Makes K/V of kv_bytes on a GPU and warms the model up. Its largest step is taken to need no
    more memory than the target's, which is kept free for both. ConfigError names the setting."""
    # only GPUs need these
    from serve.loading.cuda_runtime import described_kv, make_kv
    from serve.loading.cuda_tuning import tune_products
    from serve.runner.device_forward import DeviceForward

    shapes = StepShapes(config.batched_tokens, config.max_num_seqs)
    found = described_kv(config, spec, precision, model, device, shapes)
    made = make_kv(config, spec, found, device, kv_bytes)
    try:
        attention = made.attention(found)
        compute = DeviceForward(model, attention, device, shapes)
        if device.device.type == "cuda":
            if config.tune:
                tune_products(model, shapes, device.device)
            compute.warm_up()
    except BaseException:
        made.memory.close()
        raise
    log_sizes(config, precision, made.kv)
    runtime = Runtime(spec, precision, model, attention, made.kv, made.memory)
    return LoadedDraft(runtime, compute)


def draft_path(config: EngineConfig) -> Path:
    """Returns the directory of the draft model."""
    assert config.draft_model is not None
    is_default = config.draft_model == DEFAULT_MODEL
    return default_model_path() if is_default else Path(config.draft_model).expanduser()


def load_draft_weights(config: EngineConfig, progress: LoadProgress) -> DraftWeights:
    """Loads the weights of the draft model. Raises ConfigError and ModelLoadError."""
    target = read_spec(config.model_path)
    config = replace(config, backend=choose_backend(config, target))
    if config.backend == "cuda" and config.num_ranks > 1:
        raise ConfigError(f"speculation model needs one GPU, not {config.num_ranks} ranks of them")
    own = _own_config(config, target)
    source = read_source(own)
    if source.spec.state_layers:
        raise ConfigError(
            f"draft_model: the layers of {source.spec.model_type} have states, which rejected"
            " drafts would change for good; use a draft model with attention alone"
        )
    check_weights_fit(own, source.spec, source.precision)
    token_bytes = _token_bytes(source.config, source.spec)
    share = token_bytes / (token_bytes + _token_bytes(config, target))
    device = None
    if config.backend == "cuda":
        from serve.loading import cuda_runtime  # only GPUs need it

        device = cuda_runtime.make_step_device(source.backend.device)
    return DraftWeights(source, load_weights(source, progress), share, device)


def _own_config(config: EngineConfig, target: ModelSpec) -> EngineConfig:
    """Returns the settings with which the draft model is loaded: those of the engine, unless they
    say what only the target is."""
    path = draft_path(config)
    spec = read_spec(path)
    longest = min(spec.max_model_len, config.max_model_len or target.max_model_len)
    own = replace(
        config,
        model=DEFAULT_MODEL if config.draft_model == DEFAULT_MODEL else str(path),
        served_model_name=f"draft model {path.name}",
        tokenizer=None,
        speculation="off",
        draft_model=None,
        max_model_len=longest,
        kv_cache_bytes=None,
        kv_page_bytes=None,
        kv_cache_dir=None,
        kvp_segment_tokens=max(config.kvp_segment_tokens, -(-longest // 128) * 128),
        lend=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        kv_peers=(),
        kv_listen=None,
        kv_peer_key_file=None,
        kv_replica_bytes=None,
        kv_policy=OFF,
        weights_from=(),
        weights_listen=None,
    )
    try:
        resolve_precision(own, spec, is_trial=True)
    except ConfigError:  # what was asked for suits the target only
        own = replace(own, dtype="auto", kv_dtype="auto")
    return own


def _token_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    precision = resolve_precision(config, spec, is_trial=True)
    if precision.backend == "cuda":
        return device_layout(config, precision, spec.attention_layers).token_bytes
    groups = expected_groups(config, precision, spec)
    return kept_bytes(groups)
