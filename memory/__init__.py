"""K/V memory: stores K and V, and runs attention on the machines that store them.

This package owns the ranges of sequences, their pages and the prefix cache. It does not know
requests, HTTP or scheduling policy. Begin with kv_memory.py, which is the scheduler's view, and
attention/seam.py, which is the model's.
"""
