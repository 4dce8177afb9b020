"""The layers of a decoder with their weights: how each computes, whatever model it is part of.

Begin with blocks.py. This folder knows no checkpoints, tensors' names or configurations.
"""
