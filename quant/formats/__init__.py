"""The formats of quantized checkpoints: names and shapes of tensors, and what they unpack to.

A file holds a family of formats. This package knows names of tensors, no files; functions raise a
ValueError that names the key of config.json or the tensor. Begin with base.py and read.py.
"""
