"""The CPU back end: native kernels, and torch where it is faster.

It owns the calls into the compiled library (ops/csrc) and the choice between a native kernel and
torch. It does not know sequences or K/V pages as objects. Begin with backend.py.
"""
