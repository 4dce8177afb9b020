"""The prefix cache, and the protocol of a page store behind it.

It owns the index from chained hashes of token runs to pages, and decides whether loading a
prefix is cheaper than computing it. It does not know where a store keeps its pages. Begin with
cache.py and page_store.py.
"""
