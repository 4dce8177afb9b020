"""What all measurements share: checkpoints, tables, the machine's ceilings, an engine without a
device.

It imports nothing else of bench. Begin with ceilings.py and tables.py.
"""
