"""The real scheduler and memory manager under a virtual clock.

engine.py     one step after the other: schedule, commit, wait for nothing, update
memory.py     K/V memory without memory
settings.py   what an engine is told, and what its machine would have told
load.py       a whole load: requests' lengths and their times in, a RunResult out
keep.py       what is kept of a run, however long it is
"""
