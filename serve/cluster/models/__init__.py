"""This package serves several models at one address (`serve run A B C`).

The front (front.py) has the listener and knows no model. Each model is a child process (child.py),
an ordinary `serve run` on the loopback interface. pool.py starts children on demand, lets requests
wait for them, and puts idle ones to sleep; ledger.py decides, in bytes, which have to go. Nothing
here imports an engine.
"""
