"""`serve bench ablation`: the same requests with each optimisation off in turn.

parts.py     what is put in the place of the engine's own     variants.py  what is off
run.py       all variants, interleaved, in rounds             report.py    table and bar chart
"""
