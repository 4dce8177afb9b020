"""Sending a workload and recording the answers.

It owns connections, the parsing of streamed answers and the processes that send. It does not
compute figures. Begin with run.py.
"""
