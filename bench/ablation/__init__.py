"""`serve bench ablation`: measures the same requests with each optimisation off in turn.

The package owns the variants (variants.py), the parts that replace the engine's own (parts.py,
pools.py), the interleaved rounds (run.py) and their report (report.py). It does not know the
command line.
Begin reading with variants.py.
"""
