"""`make gpu`: every GPU test and measurement in one run of less than ten minutes.

Each section runs in a process of its own, and results are written after every case. It is not
part of the wheel. Begin with report.py.
"""
