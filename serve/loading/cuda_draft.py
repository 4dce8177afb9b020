"""A draft model on its target's GPU: K/V of its own, and what computes its steps.

Its largest step is taken to need no more memory than the target's, which is kept free for both.
"""

from __future__ import annotations

from serve.config import EngineConfig
from serve.loading.cuda_runtime import described_kv, make_kv
from serve.loading.cuda_tuning import tune_products
from serve.loading.precision import Precision
from serve.loading.runtime import Runtime, log_sizes
from serve.models import Decoder, ModelSpec
from serve.runner.device_forward import DeviceForward
from serve.runner.graph_shapes import StepShapes
from serve.runner.step_device import StepDevice


def load_cuda_draft(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    model: Decoder,
    device: StepDevice,
    kv_bytes: int,
) -> tuple[Runtime, DeviceForward]:
    """Makes K/V of kv_bytes and warms the model up. ConfigError names the setting."""
    shapes = StepShapes(config.batched_tokens, config.max_num_seqs)
    found = described_kv(config, spec, precision, model, device, shapes)
    made = make_kv(config, spec, found, device, kv_bytes)
    is_gpu = device.device.type == "cuda"
    try:
        attention = made.attention(found)
        compute = DeviceForward(model, attention, device, shapes)
        if is_gpu:
            if config.tune:
                tune_products(model, shapes, device.device)
            compute.warm_up()
    except BaseException:
        made.memory.close()
        raise
    log_sizes(config, precision, made.kv)
    return Runtime(spec, precision, model, attention, made.kv, made.memory), compute
