"""Connections between the ranks of a group, and what is said over them."""
