"""Quantization: int4 and NF4 weights, quantized checkpoints, the int8 K/V format."""
