"""`make gpu`: every GPU test and measurement in one run of less than ten minutes.

It owns the sections, each of which runs in a process of its own and writes its results after every
case, and the report. It knows no command line but its own and is not part of the wheel. Begin
reading with report.py.
"""
