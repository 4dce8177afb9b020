"""Sends a workload and records the answers.

The package owns connections, the parsing of streamed answers and the processes that send. It
computes no figures. Begin with run.py.
"""
