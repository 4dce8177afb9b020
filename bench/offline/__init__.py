"""Measurements without arrivals: `serve bench throughput | latency | startup | ablation`.

page.py      what heads every result: machine, versions, tables, the file
bound.py     what the machine can do, and what a model's steps must do at least
requests.py  fixed sets of requests
"""
