"""The commands: `serve run`, `chat`, `eval`, `models` and `node`.

This is the only folder that reads the command line, the environment and configuration files. It
knows nothing of steps, pages or HTTP bodies: it makes an `EngineConfig` and `HttpSettings` and
hands them on. Begin with main.py, which lists the commands, then run.py.
"""
