"""Quantization: int4 and NF4 weights, quantized checkpoints, the int8 K/V format.

This package owns the number formats and the conversion of weights to them; ops computes with them.
It does not know models, K/V ranges or scheduling. Begin with int4.py and kv.py.
"""
