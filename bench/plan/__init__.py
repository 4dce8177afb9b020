"""What a model costs on a machine, from sizes and peaks: `serve plan`.

Shapes (shapes.py, models.toml) and devices (hardware.py, hardware.toml) make the cost of a step
(cost.py); all else follows from it: what fits (capacity.py), figures and choices.
"""
