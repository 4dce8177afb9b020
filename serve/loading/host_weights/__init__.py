"""Weights in host memory beside a GPU: experts that the CPU computes, and a ring for the rest.

link.py moves bytes between the two, placement.py decides what is where, source.py and cache.py
build the model so, experts.py and ring.py are what a step does. device_experts.py lets the device
compute some of the experts, hot_experts.py and expert_ring.py, from memory that expert_memory.py
and device_form.py describe.
"""
