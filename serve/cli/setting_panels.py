"""The panels of the help of `serve run`, and what an option has to say."""

from __future__ import annotations

from dataclasses import dataclass

SERVER = "Server"
SECURITY = "Security"
MODEL = "Model and precision"
SCHEDULING = "Scheduling"
MEMORY = "Memory"
NODES = "Memory nodes"
LIMITS = "Limits and deadlines"
LOGS = "Logs and metrics"
SEVERAL_MODELS = "Several models"
ROUTERS = "For routers"
PANELS = (SERVER, SECURITY, MODEL, SCHEDULING, MEMORY, NODES, SEVERAL_MODELS, LIMITS, LOGS, ROUTERS)


@dataclass(frozen=True, slots=True)
class Option:
    """Describes the command-line option of a setting.

    metavar: the value's placeholder in the help. is_size: the value is a number of bytes or a size
    such as "2GiB". choices: values that the shell completes. flags, envs: further names of the
    flag and the variable. is_secret: only the environment sets it, and it is never printed.
    """

    panel: str
    help: str
    metavar: str | None = None
    is_size: bool = False
    choices: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    envs: tuple[str, ...] = ()
    is_secret: bool = False
