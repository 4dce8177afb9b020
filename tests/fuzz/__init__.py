"""Fuzzing of everything that reads bytes, see targets.py. `make fuzz` runs it."""
