"""The attention seam and its local implementations.

All access to K/V goes through the protocol in seam.py, which is planned once per step and called
once per layer; kv_layout.py defines where a token's K and V lie. The package does not know
scheduling, and only memory.nodes knows that attention may run on another machine. Read seam.py
first, then local.py.
"""
