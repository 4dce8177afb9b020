"""Runs other engines beside `serve bench latency --peer` and converts checkpoints for them.

The files are scripts for the other engine's own virtual environment (`VLLM/bin/python
bench/peers/run_vllm.py ...`). They import one another as neighbours and nothing of this package.
Begin reading with runner.py. The wheel does not contain them.
"""
