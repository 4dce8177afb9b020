"""Models in GGUF files as directories, which is what the rest of the code reads.

This folder owns the small directories that are kept for such files in the user's cache. Begin with
directory.py.
"""
