"""The fields of request bodies, declared once.

The same declaration checks a body, fills the defaults and describes the route in /openapi.json.
This folder does not know which API a field belongs to or what the engine does with it. Begin
with fields.py.
"""
