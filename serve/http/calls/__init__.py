"""One API call on the engine, whichever API it arrived by.

It owns the common form of a conversation, tools, sampling and structured-output fields, and the
run of a generation from submission to its deltas. It does not know how OpenAI or Anthropic shape
their answers. Begin with key_policy.py and generation.py.
"""
