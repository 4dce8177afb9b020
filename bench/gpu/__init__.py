"""`make gpu`: every GPU test and measurement in one run of less than ten minutes.

It owns the report and its sections, each of which runs in a process of its own and writes its
results after every case. It has only its own command line and is not part of the wheel. Begin
reading with report.py.
"""
