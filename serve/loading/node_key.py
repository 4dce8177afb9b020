"""The secrets that engines share with memory nodes, and with the other ranks of a group."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from serve.config import EngineConfig
from serve.errors import ConfigError, reason
from serve.regular_file import open_regular

logger = logging.getLogger(__name__)

MAX_KEY_BYTES = 1 << 16
LOCAL_KEY = b"mergestep: only this user"
_OPEN_KEY_SCHEMES = ("inproc", "shm")  # only this user can connect


def read_key(config: EngineConfig) -> bytes:
    """Returns the shared secret. ConfigError if a node needs one and none is set."""
    path = config.memory_node_key_file
    if path is None:
        for url in (*config.memory_nodes, *config.holders, *filter(None, [config.lend])):
            if url.partition("://")[0] not in _OPEN_KEY_SCHEMES:
                raise ConfigError(
                    f"{url} needs a memory_node_key_file, a secret that engines and nodes share"
                )
        return LOCAL_KEY
    return read_key_file(path, "memory_node_key_file")


def read_key_file(path: str | Path, setting: str) -> bytes:
    """Returns the secret in a file. ConfigError names the setting."""
    try:
        with open_regular(path) as file:
            key = file.read(MAX_KEY_BYTES + 1).strip()
            mode = os.fstat(file.fileno()).st_mode
        if mode & 0o077:
            logger.warning("%s %s can be read by other users: chmod 600", setting, path)
    except OSError as error:
        raise ConfigError(f"{setting} {path}: {reason(error)}") from error
    if len(key) > MAX_KEY_BYTES:
        raise ConfigError(f"{setting} {path} is larger than {MAX_KEY_BYTES >> 10} KiB")
    if len(key) < 16:
        raise ConfigError(f"{setting} {path} has less than 16 bytes")
    return key
