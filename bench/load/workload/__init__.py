"""The requests of a load test and their times.

The package owns data sets, traces, arrival processes and the schedule made from them. It does not
know how a request is sent. Begin with schedule.py.
"""
