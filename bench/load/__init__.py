"""The load generator behind `serve bench`.

It owns workload/ (what is sent, and when), client/ (sending), results/ (figures), report/ (tables
and pictures) and proof/ (a scripted server that checks the figures), each of which imports only
those before it. It does not know how an engine works inside. Begin with workload/schedule.py and
client/run.py.
"""
