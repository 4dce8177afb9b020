"""The load generator behind `serve bench`.

work.py      what is sent, and when          run.py       sends it, on an absolute schedule
targets.py   an engine here, or a server     record.py    what came back: everything that is kept
report.py    from records to figures
"""
