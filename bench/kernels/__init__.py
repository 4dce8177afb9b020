"""Measurements of operators, K/V memory, disks and transports.

Each module prints its figures as a share of the machine's measured ceiling. None runs an engine.
Begin with ops.py.
"""
