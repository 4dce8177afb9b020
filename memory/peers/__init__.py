"""K/V pages by name between engines: a page store that pulls from peers, and the server of ours.

A page's name is its key in the prefix cache. Engines of one key and one model give the same tokens
the same names, so a name is all that one asks another for. Begin with wire.py.
"""
