"""The engine: three thread pools, the loop between them, and its asyncio and offline interfaces.

It owns the life of a request from submission to its last delta. It does not know HTTP, and it
leaves every decision about what runs next to serve.scheduler. Begin with core.py, whose loop is
schedule, run, update; engine.py and llm.py are the two interfaces.
"""
