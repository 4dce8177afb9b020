"""Text to token ids and back, and chat templates.

It owns the tokenizer, incremental detokenization and the rendering of a conversation as a
prompt. It does not know requests or the engine. Begin with tokenizer.py.
"""
