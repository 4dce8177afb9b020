"""Weights in host memory beside a GPU: experts that the CPU computes, and a ring for the rest.

link.py moves bytes between the two, placement.py decides what is where, source.py and cache.py
build the model so, experts.py and ring.py are what a step does.
"""
