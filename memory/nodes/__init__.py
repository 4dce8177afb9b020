"""Memory nodes: other machines that hold K/V and compute the attention over it.

It owns both ends, the wire format, placement and what happens when a node is lost. It does not
know requests or scheduling policy. Begin with remote_attention.py for the engine's end and
server/node.py for the node's.
"""
