"""What a load test sends, and when.

It owns data sets, traces, arrival processes and the schedule made from them. It does not know
how a request is sent. Begin with schedule.py.
"""
