"""The Triton kernels, and the functions that launch one of them.

Each module owns the kernels of one operator; ops/cuda chooses the kernel for a shape. Begin with
linear.py or decode.py; tiles.py has shared parts of the attention kernels.
"""
