"""A small model of long-range tasks, and the measure of what compressed K/V costs it."""
