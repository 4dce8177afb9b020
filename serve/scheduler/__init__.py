"""Scheduling policy in integers and floats: which sequences run in the next step, and with how
many rows.

It owns the queue policies, admission, chunking, preemption and the step-time model. It knows no
torch, numpy or asyncio; time and costs are passed in, so that simulation and tests run the same
code. Begin with scheduler.py.
"""
