"""The load generator behind `serve bench`.

schedule.py  from settings to what is sent   work.py      what is sent, and when
datasets.py  which requests: their names     arrivals.py  when they are due
calls.py     their common form: lengths      prompts.py   from lengths to prompts
traces.py, text_files.py, published.py       the files of requests, and traces without files

run.py       sends it, on an absolute schedule
targets.py   an engine here, or a server     record.py    what came back: everything that is kept
report.py    from records to figures         truth.py     whether the figures are true

Inside the sending: options.py, sender.py (one process), processes.py and worker.py (several),
http_client.py, answer.py and sse.py (a server's answers), timer.py, health.py, server_metrics.py.
The proof's server: fake_server.py, which does what fake_script.py says.
"""
