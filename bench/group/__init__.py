"""Measurements of groups of ranks."""
