"""`serve plan`: predicts a model's cost on a machine from its sizes and the machine's peaks.

The package owns the cost model (cost.py), the models and devices that it takes (shapes.py,
hardware.py and their tables), and what follows from it: memory capacity (capacity.py), latency and
throughput of requests (serving.py) and the ranking of machines (search.py). It loads no model and
knows no scheduler. Begin reading with cost.py.
"""
