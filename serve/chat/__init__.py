"""A conversation and its answer, for HTTP and for the library alike.

This folder owns what a caller may ask of an answer (tools, reasoning, structured output), which
parameters of the engine follow from it, and how the answer's text is read. It knows neither the
engine nor HTTP. Begin with request.py and answer_plan.py.
"""
