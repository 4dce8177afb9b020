"""From figures to the terminal, HTML and pictures.

It owns every table and plot of a load test. It computes no figure of its own. Begin with
report.py.
"""
