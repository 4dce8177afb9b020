"""K/V of running sequences beyond memory: the pool's pages have numbers, a part of their K/V is in
frames of memory, and the rest in a file.

The package owns which units of K/V are in memory and where, and the file of the others. A unit is
the slice of one layer in one tile. It does not know sequences, attention or the accounting of
pages. Begin with residency.py.
"""
