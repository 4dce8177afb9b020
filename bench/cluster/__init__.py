"""This package measures several servers that work as one.

models.py: several models at one address, on memory for fewer.
"""
