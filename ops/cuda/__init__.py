"""The CUDA back end: packing of weights, tuning and launches.

It chooses the kernel for a shape; the kernels are in ops/triton_kernels. It does not know sequences
or CUDA graphs. Begin with backend.py.
"""
