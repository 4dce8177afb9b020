"""Measurements of the engine's own overhead, HTTP, structured output and long runs.

Each module is one measurement and imports none of the others. `serve bench` offers some of them.
Begin with engine_overhead.py.
"""
