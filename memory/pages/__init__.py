"""Virtual address ranges, physical pages and their mapping, on Linux and CUDA.

It owns reservation, mapping, unmapping and the page accounting in integers. It does not know
sequences, tokens' values or attention. Begin with kv_range.py and allocator.py; vmm.py and
cuda_vmm.py are the two systems.
"""
