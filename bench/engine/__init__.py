"""Measurements of the engine's own machinery, HTTP, structured output and long runs.

Each module is one measurement, and `serve bench` offers some of them. None knows another. Begin
with engine_overhead.py.
"""
