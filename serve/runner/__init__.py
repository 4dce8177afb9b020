"""One step on a device: a step plan in, token ids out, synchronously.

It owns batches, sampling, token masks on rows and CUDA graphs. It does not know waiting
requests, queues or asyncio. Begin with runner.py for the CPU and cuda_runner.py for CUDA.
"""
