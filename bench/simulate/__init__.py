"""The real scheduler and memory manager under a virtual clock (docs/simulator.md).

It owns the simulated loop (engine.py), its memory (memory.py), a whole run (load.py) and the
comparisons that use them: check.py with real runs, memory_policy.py, order.py and policies.py
among policies. It computes no tokens and knows no device. Begin reading with engine.py.
"""
