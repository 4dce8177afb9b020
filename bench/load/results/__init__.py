"""Computes figures from records.

The package owns metrics, confidence intervals, SLOs, the search for a rate and the JSON document.
It prints nothing and draws nothing. Begin with summary.py.
"""
