"""Measurements of several servers side by side, and what clients see of what breaks.

models.py: several models at one address, on memory for fewer. failover.py: equal servers that are
killed, stopped, cut off and updated. routing.py: chats over equal servers.
"""
