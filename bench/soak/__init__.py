"""A mixed load for hours on a server process: what it keeps, and whether its memory grows.

`serve bench soak` is the command.
"""
