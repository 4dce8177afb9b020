"""The load generator behind `serve bench`.

The package owns workload/ (the requests and their times), client/ (sending), results/ (figures),
report/ (tables and pictures) and proof/ (a scripted server that checks the figures). Each of these
imports only those before it. The package does not know how an engine works inside. Begin with
workload/schedule.py and client/run.py.
"""
