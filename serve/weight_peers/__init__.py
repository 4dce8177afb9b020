"""Packed weights from the memory of a replica that runs, instead of from a disk.

This folder owns the exchange: what two replicas must have in common, the messages, who serves and
who pulls. The format of the bytes is that of serve/models/packed_cache. Begin with wire.py.
"""
