"""Serves model classes of Transformers that have no row in the table of families.

A class is exported as a graph of operators, with its calls of the attention interface as nodes. The
graph is cut at them into slices, which the runner drives like those of the native decoder. This
folder is imported only where the setting `converter` asks for it, and only it imports
transformers. Begin with capture.py, graph.py and model.py.
"""
