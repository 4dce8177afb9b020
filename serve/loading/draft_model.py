"""Loads a draft model: a second, small model in this process, whose K/V is memory of its own.

Both models divide the K/V memory by the bytes of a token, so that as many tokens of either fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from memory.pages.layer_groups import kept_bytes
from serve.config import DEFAULT_MODEL, EngineConfig, default_model_path
from serve.errors import ConfigError
from serve.loading.footprint import check_weights_fit
from serve.loading.kv_layouts import expected_groups
from serve.loading.model_source import ModelSource, load_weights, read_source
from serve.loading.precision import choose_backend, resolve_precision
from serve.loading.runtime import Runtime, load_local
from serve.machine import local_kv_bytes
from serve.models import ModelSpec, StepModel, read_spec
from serve.models.progress import LoadProgress


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A draft model without K/V memory. kv_share: the part of the K/V memory that it gets."""

    source: ModelSource
    model: StepModel
    kv_share: float

    def with_kv(self, config: EngineConfig) -> Runtime:
        """Reserves its K/V. config: the engine's. If memory holds fewer tokens than its longest
        context, that is lowered: longer sequences have no drafts."""
        own, spec, precision, backend, _ = self.source
        num_bytes = int((config.kv_cache_bytes or local_kv_bytes()) * self.kv_share)
        spec = replace(spec, max_model_len=own.max_model_len or spec.max_model_len)
        own = replace(own, max_model_len=None)
        return load_local(own, spec, precision, self.model, backend, max(1, num_bytes))


def draft_path(config: EngineConfig) -> Path:
    """Returns the directory of the draft model."""
    assert config.draft_model is not None
    is_default = config.draft_model == DEFAULT_MODEL
    return default_model_path() if is_default else Path(config.draft_model).expanduser()


def load_draft_weights(config: EngineConfig, progress: LoadProgress) -> DraftWeights:
    """Loads the weights of the draft model. Raises ConfigError and ModelLoadError."""
    target = read_spec(config.model_path)
    if choose_backend(config, target) == "cuda":
        raise ConfigError("draft_model needs the cpu back end, not cuda: use backend cpu")
    own = _own_config(config, target)
    source = read_source(own)
    check_weights_fit(own, source.spec, source.precision)
    token_bytes = _token_bytes(source.config, source.spec)
    share = token_bytes / (token_bytes + _token_bytes(config, target))
    return DraftWeights(source, load_weights(source, progress), share)


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
    )
    try:
        resolve_precision(own, spec, is_trial=True)
    except ConfigError:  # what was asked for suits the target only
        own = replace(own, dtype="auto", kv_dtype="auto")
    return own


def _token_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    precision = resolve_precision(config, spec, is_trial=True)
    groups = expected_groups(config, precision, spec.attention_layers, spec.max_model_len)
    return kept_bytes(groups)
