"""What a group raises when a rank is gone or has no result."""

from __future__ import annotations

from memory.nodes.errors import NodesLostError


class GroupLostError(NodesLostError):
    """A worker is gone, and with it its part of all K/V; it has to be computed again."""


class StepLostError(Exception):
    """A step failed on another rank. The text is that rank's."""
