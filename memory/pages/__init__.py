"""Virtual address ranges, physical pages and their mapping, on Linux and CUDA.

The package owns reservation, mapping, unmapping and the accounting of pages in integers. It does
not know sequences, token values or attention. Read kv_range.py and allocator.py first; linux_vmm.py
and cuda_vmm.py implement virtual_memory.py's protocol on the two systems.
"""
