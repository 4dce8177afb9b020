"""Builds a model, its K/V memory and a runner from an `EngineConfig`.

This package owns everything that is decided once at start-up: precision, K/V sizes, the disk tier,
memory nodes and CUDA tuning. It does not know requests. Begin with runtime.py.
"""
