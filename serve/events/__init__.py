"""What the server publishes about its K/V cache, in vLLM's format, for routers.

The package turns the pages that memory.prefix.block_recorder records into events of blocks and
sends them over ZeroMQ from a thread of its own. Read publisher.py first.
"""
