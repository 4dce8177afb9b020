"""Models whose weights do not fit into memory: what streaming reaches of the disk (run.py), beside
a server that maps its weights, also under a real limit (limited.py), and whether leaving out
neurons would pay (neurons.py)."""
