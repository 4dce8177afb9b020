"""States: what layers with a state of fixed size keep of a sequence, beside K/V of other layers.

A range has a record of all layers' states for every so many tokens, the interval. Rows read the
state of the row before them and write theirs to the record of their own interval, so that a record
whose interval is complete is a snapshot: nothing was copied for it, and the prefix cache keeps its
pages as it keeps those of K/V. This folder knows no models. Begin with layout.py.
"""
