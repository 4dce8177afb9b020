"""Shows figures on the terminal, in HTML and in pictures.

The package owns every table and plot of a load test and computes no figures itself. Begin with
report.py.
"""
