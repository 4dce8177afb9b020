"""Weights beyond memory: some stay resident, the others are read from the disk in every step.

This folder owns which weights are resident (placement.py), the file they are read from (reader.py),
the ring of buffers for layers (ring.py) and the slots for experts (experts.py). The file is the one
of serve/models/packed_cache, whose layout is that of the kernels, so that a layer computes over a
buffer of the ring as over any other memory and has the same bits. It knows no requests and no K/V.
Begin with cache.py.
"""
