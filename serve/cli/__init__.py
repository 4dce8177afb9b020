"""The commands: `serve run`, `chat`, `eval`, `models` and `node`.

Only this folder reads the command line, the environment and configuration files, of which it
makes an `EngineConfig` and `HttpSettings`. It knows nothing of steps, pages or HTTP bodies. Begin
with main.py, which lists the commands, then read run.py.
"""
