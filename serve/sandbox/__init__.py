"""A child process with limits on memory and time, for data that is not trusted.

It owns the process and its protocol of lines. It does not know what the worker scripts compute.
Begin with worker.py; worker_main.py is the child's side.
"""
