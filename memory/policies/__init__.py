"""Which of a sequence's K/V is read (selection) or kept (eviction): scores in, tiles or tokens out.

Nothing here knows kernels or pages. setting.py reads the setting `kv_policy`; selection.py says how
much a decoded row reads.
"""
