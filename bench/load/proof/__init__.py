"""A scripted server with known times, which proves that the load generator's figures are true.

It is not part of the wheel, and no report imports it. Begin with truth.py.
"""
