"""Bytes between machines: windows and sequence numbers. Empty until memory nodes land."""
