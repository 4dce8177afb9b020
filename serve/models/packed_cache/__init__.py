"""Packed weights kept in files, so that the next start maps them instead of packing again.

This folder owns the files: their names, their format, and what may be trusted. A file has what
loading made, in the order in which serve/models/assemble.py asked for it, for one checkpoint, one
precision, one rank and one version of the code. Begin with cache.py.
"""
