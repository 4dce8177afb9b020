"""Speculative decoding: what proposes tokens, and how many of them a step computes."""
