"""Quantizes checkpoints with the help of a text: what the inputs of products look like on it, and
the checkpoint that is written."""
