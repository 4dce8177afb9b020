"""The kinds of tensors of GGUF files: their blocks, and products computed from them.

A block is a run of 32 or 256 weights of a row with their scales. This package knows bytes of
tensors, no files. Begin with kinds.py and formats.py.
"""
