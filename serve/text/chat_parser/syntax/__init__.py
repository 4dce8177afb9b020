"""What formats of tool calls are made of: the reader of an answer, and syntaxes that rows share.

This folder does not know which formats there are. Begin with format_types.py and reader.py.
"""
