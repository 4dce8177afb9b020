"""Serves operators: health, metrics, access logs, traces, /openapi.json and the page.

It reads the engine's statistics and the server's counters and changes neither. It does not take
part in answering API calls. Begin with exposition.py, metric_table.py and health.py.
"""
