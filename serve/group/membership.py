"""A group whose processes are started by others: torchrun, or a LeaderWorkerSet of Kubernetes.

Their environment variables say which rank a process is and where the engine, rank 0, listens.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from serve.config import EngineConfig
from serve.errors import ConfigError, reason
from serve.loading.node_key import read_key_file
from transport.encryption import is_loopback
from transport.tcp import address_of

_DEFAULT_PORT = 29500  # torchrun's
_KEY_BYTES = 32


class Membership(NamedTuple):
    """One process's place. url: where rank 0 listens. local_rank, local_size: its number among the
    ranks of its host, and theirs."""

    rank: int
    size: int
    url: str
    local_rank: int
    local_size: int

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def is_local(self) -> bool:
        """Whether all ranks meet on the loopback interface."""
        try:
            return self.host == "localhost" or is_loopback(self.host)
        except ValueError:  # a name
            return False

    @property
    def engine_url(self) -> str:
        """Where rank 0 listens, on all its interfaces: a name may lead to several addresses."""
        if self.is_local:
            return self.url
        return _url("::" if _has_only_ipv6(self.host) else "0.0.0.0", urlsplit(self.url).port or 0)

    @property
    def own_url(self) -> str:
        """Where another rank than 0 listens for the ranks that connect to it: at the address from
        which it reaches rank 0, on a free port. OSError if it reaches none."""
        if self.is_local:
            return _url(self.host, 0)
        family, kind, _, _, address = socket.getaddrinfo(
            self.host, urlsplit(self.url).port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as sock:
            sock.connect(address)  # sends nothing
            return _url(sock.getsockname()[0], 0)


def read_membership(
    config: EngineConfig, environment: Mapping[str, str] = os.environ
) -> Membership | None:
    """Returns this process's place in a group that others have started; None if they have not.

    ConfigError if the variables contradict one another or the settings. A model on one rank has
    none, whatever started its process.
    """
    if config.num_ranks == 1:
        return None
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank_name, size_name, host_name = "RANK", "WORLD_SIZE", "MASTER_ADDR"
    elif "LWS_WORKER_INDEX" in environment and "LWS_GROUP_SIZE" in environment:
        rank_name, size_name = "LWS_WORKER_INDEX", "LWS_GROUP_SIZE"
        host_name = "LWS_LEADER_ADDRESS"
    else:
        return None
    rank, size = _number(environment, rank_name, 0), _number(environment, size_name, 1)
    if size != config.num_ranks:
        raise ConfigError(
            f"{size_name} {size} is not tensor_parallel_size * pipeline_parallel_size, "
            f"{config.tensor_parallel_size} * {config.pipeline_parallel_size}"
        )
    if rank >= size:
        raise ConfigError(f"{rank_name} {rank} is not below {size_name} {size}")
    if size == 1:
        return None
    url = config.group_url or _default_url(environment, host_name)
    _check_url(url)
    local_rank = _number(environment, "LOCAL_RANK", 0, 0)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, 1)
    return Membership(rank, size, url, min(local_rank, local_size - 1), local_size)


def _default_url(environment: Mapping[str, str], host_name: str) -> str:
    host = environment.get(host_name, "")
    if not host:
        raise ConfigError(f"{host_name} is not set, nor is group_url: where does rank 0 listen?")
    # torchrun's own store listens at the port itself
    port = _number(environment, "MASTER_PORT", 1, _DEFAULT_PORT) + 1
    if port > 65535:
        raise ConfigError(f"MASTER_PORT {port - 1} leaves no next port; set group_url")
    return _url(host, port)


def _check_url(url: str) -> None:
    try:
        address_of(url)
    except ValueError as error:
        raise ConfigError(f"group_url {error}") from error
    if not url.startswith("tcp://"):
        raise ConfigError(f"group_url {url}: an address such as tcp://10.0.0.2:7070 is needed")


def _number(
    environment: Mapping[str, str], name: str, least: int, default: int | None = None
) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < least:
        raise ConfigError(f"{name} must be a whole number from {least} on, not {text!r}")
    return int(text)


def _url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _has_only_ipv6(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(family == socket.AF_INET6 for family, *_ in found)


def read_group_key(config: EngineConfig, member: Membership) -> bytes:
    """Returns the secret that all ranks share. ConfigError if the group needs a file and has none.

    On the loopback interface, a file of the user serves.
    """
    if config.group_key_file is not None:
        return read_key_file(config.group_key_file, "group_key_file")
    if not member.is_local:
        raise ConfigError(f"{member.url} needs a group_key_file, a secret that all ranks share")
    path = Path(tempfile.gettempdir()) / f"mergestep-group-{os.getuid()}.key"
    try:
        _make_key(path)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"{path}: {reason(error)}; set group_key_file") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} is not this user's alone; set group_key_file")
    return read_key_file(path, "group_key_file")


def _make_key(path: Path) -> None:
    """Writes a secret unless there is one; of several processes, the first does."""
    if path.is_symlink() or path.exists():
        return
    fd, name = tempfile.mkstemp(prefix="mergestep-group-", dir=path.parent)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(os.urandom(_KEY_BYTES).hex())
        try:
            os.link(name, path)
        except FileExistsError:
            return
    finally:
        os.unlink(name)
