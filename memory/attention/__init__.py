"""The attention seam and its local implementations.

Everything that needs K/V goes through the protocol in seam.py, planned once a step and called
once a layer; kv_layout.py says where a token's K and V lie. It does not know scheduling, and
only memory.nodes knows that attention may run on another machine. Begin with seam.py, then
local.py.
"""
