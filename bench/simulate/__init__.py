"""Runs the real scheduler and memory manager under a virtual clock (docs/simulator.md).

The package owns the simulated loop (engine.py), its memory (memory.py), a whole run (load.py) and
the comparisons that use them: check.py compares with real runs, and memory_policy.py, order.py and
policies.py compare policies. It computes no tokens and knows no device. Begin reading with
engine.py.
"""
