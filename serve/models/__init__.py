"""Loads Hugging Face checkpoints as decoders.

This folder owns the families of models, their specification and weights, and the decoder that all
of them share. It does not know requests, steps or where K/V lies. Begin with spec.py and
decoder.py.
"""

from serve.models.decoder import Decoder, StageModel, StepModel, run_interleaved
from serve.models.families import FAMILIES
from serve.models.spec import ModelSpec, read_generation_defaults, read_spec
from serve.models.tensors import ParameterCounts
from serve.models.weights import count_parameters, expect_tensors, load_embedding, load_model

__all__ = [
    "FAMILIES",
    "Decoder",
    "ModelSpec",
    "ParameterCounts",
    "StageModel",
    "StepModel",
    "count_parameters",
    "expect_tensors",
    "load_embedding",
    "load_model",
    "read_generation_defaults",
    "read_spec",
    "run_interleaved",
]
