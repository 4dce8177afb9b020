"""The conversion between text and token ids, and chat templates.

This folder owns the tokenizer, incremental detokenization, and the rendering of a conversation as
a prompt. It does not know requests or the engine. Begin with tokenizer.py.
"""
