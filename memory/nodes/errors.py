"""Losses of memory nodes, which the engine handles; without nodes it imports nothing else here."""


class NodesLostError(Exception):
    """K/V on a memory node cannot be reached and has to be computed again."""


class NoNodeError(Exception):
    """No node can take the K/V; the message states the reason."""
