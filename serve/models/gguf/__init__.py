"""GGUF files, which hold a whole model: keys with values, a tokenizer, tensors.

This folder knows their bytes, no products. Everything in a file may be hostile. Begin with
reader.py.
"""
