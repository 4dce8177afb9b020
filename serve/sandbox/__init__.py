"""A child process with limits on memory and time, for untrusted input.

This folder owns the process and its line protocol. It does not know what the worker scripts
compute. Begin with worker.py; worker_main.py runs in the child process.
"""
