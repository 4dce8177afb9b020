"""Anthropic's Messages API: its requests, answers, events and errors.

It converts content blocks and tools to the common form and writes answers in Anthropic's shapes.
It does not know OpenAI's APIs. Begin with endpoint.py.
"""
