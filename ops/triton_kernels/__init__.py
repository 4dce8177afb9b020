"""The Triton kernels, and the functions that launch one of them.

Each module owns the kernels of one operator. No module decides which kernel a shape gets: that
is ops/cuda. Begin with linear.py or decode.py; tiles.py has the parts they share.
"""
