"""The CUDA back end: packing of weights, tuning and launches.

It owns the choice of a kernel for a shape; the kernels themselves are in ops/triton_kernels. It
does not know sequences or CUDA graphs. Begin with backend.py.
"""
