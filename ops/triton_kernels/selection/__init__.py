"""Which tiles of K/V a decoded row reads: bounds of their keys, scores by these, and the choice.

bounds.py writes the bounds, scores.py compares them with queries, choice.py lists the tiles with
the largest scores; ops.triton_kernels.decode attends to them.
"""
