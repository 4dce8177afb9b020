"""OpenAI's Responses API: its requests, answers and events, and the responses that it stores.

It owns the store of responses and the conversion of items to messages. It does not know how the
engine runs a request. Begin with endpoint.py.
"""
