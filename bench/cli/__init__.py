"""`serve bench ...` and `serve plan`: from options to calls.

It owns the options of each command and nothing else. Every measurement is done by the folder
that bears its name. Begin with main.py.
"""
