"""The measurements: the load generator, benchmarks of the parts, the planner and the simulator.

The packages serve, ops, quant, memory and transport know nothing of it; only `serve bench` and
`serve plan` import it. Begin with cli/main.py, which names every measurement, and docs/bench.md.
"""
