"""`serve bench ...` and `serve plan`: turns command-line options into calls.

The package owns the options of each command, and reports that need them. The measurements
themselves are in the folders of bench that have their names. Begin with main.py.
"""
