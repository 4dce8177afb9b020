"""`serve plan`: what a model costs on a machine, from its sizes and the machine's peaks.

It owns the cost model (cost.py) and what follows from it: shapes.py and hardware.py with their
tables, what fits (capacity.py), what requests get (serving.py) and which machine is best
(search.py). It loads no model and knows no scheduler. Begin reading with cost.py.
"""
