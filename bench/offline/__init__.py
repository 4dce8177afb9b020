"""Measurements without an arrival process: throughput, latency and start-up time.

The package owns their runs and their comparison with other engines; tables and ceilings are those
of bench/common. It does not know the command line. Begin with throughput.py.
"""
