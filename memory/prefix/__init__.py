"""The prefix cache, and the protocol of a page store behind it.

The package owns the index from chained hashes of token runs to pages, and decides whether loading
a prefix is cheaper than computing it. It does not know where a store keeps its pages. Read
cache.py and page_store.py first.
"""
