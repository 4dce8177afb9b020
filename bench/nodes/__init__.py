"""Measurements of memory nodes: cost, overlap and faults.

memory_nodes.py is `serve bench nodes`; the others are for development and are not in the wheel.
Begin with memory_nodes.py.
"""
