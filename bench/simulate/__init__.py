"""The real scheduler and memory manager under a virtual clock (docs/simulator.md).

engine.py     one step after the other: schedule, commit, wait for nothing, update
memory.py     K/V memory that is only accounted for
settings.py   what an engine is told
load.py       a whole load: requests' lengths and times in, a run's result out
keep.py       what is kept of a run, however long it is
machine.py    settings of a machine and a model of `serve plan`
command.py    `serve bench --simulate`
check.py      beside a real run      replay.py    how fast it is      policies.py    an example
"""
