"""Finds pyverbs, and the port of an RDMA device to send from."""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from transport.base import TransportError

DEBIAN_PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
logger = logging.getLogger(__name__)


class RdmaUnavailableError(TransportError):
    """This machine has no verbs library for this Python, or no port to send from."""


def pyverbs(name: str) -> Any:
    """Imports the module pyverbs.`name`.

    Raises RdmaUnavailableError, which names the package to install.
    """
    try:
        if "pyverbs" not in sys.modules and importlib.util.find_spec("pyverbs") is None:
            _import_debian_package()
        with _root_logger_untouched():
            return importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise RdmaUnavailableError(
            "rdma:// needs pyverbs: install Debian's python3-pyverbs, rdma-core and "
            f"ibverbs-providers, or build rdma-core's for this Python {version} ({error})"
        ) from error


def _import_debian_package() -> None:
    """Imports Debian's package from its own folder. The folder above it stays off sys.path, because
    it would bring every other package of the distribution."""
    spec = importlib.util.spec_from_file_location(
        "pyverbs",
        DEBIAN_PYVERBS / "__init__.py",
        submodule_search_locations=[str(DEBIAN_PYVERBS)],
    )
    if spec is None or spec.loader is None or not (DEBIAN_PYVERBS / "__init__.py").exists():
        raise ImportError(f"there is no pyverbs, and none in {DEBIAN_PYVERBS}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["pyverbs"] = module


@functools.cache
def constants() -> SimpleNamespace:
    """Collects the IBV_... numbers, which releases keep in different modules and enumerations."""
    try:
        module = pyverbs("enums")
    except RdmaUnavailableError:
        module = pyverbs("libibverbs_enums")
    found: dict[str, int] = {}
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, enum.IntEnum | enum.IntFlag):
            found |= {member: int(value[member]) for member in value.__members__}
        elif name.startswith("IBV_"):
            found[name] = int(value)
    return SimpleNamespace(**found)


@contextlib.contextmanager
def _root_logger_untouched() -> Iterator[None]:
    """Undoes what pyverbs does to the root logger on import, which only the program may set up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextlib.contextmanager
def verbs_errors(doing: str) -> Iterator[None]:
    """Turns errors of pyverbs into a TransportError that names the action."""
    try:
        yield
    except pyverbs("pyverbs_error").PyverbsError as error:
        raise TransportError(f"{doing}: {' '.join(str(error).split())}") from error


class Port(NamedTuple):
    """An active port of an open device, and the address it sends from."""

    context: Any
    device: str
    number: int
    gid_index: int
    gid: str
    lid: int
    mtu: int
    is_ethernet: bool
    max_message_bytes: int


def open_port(
    device: str | None = None,
    port: int | None = None,
    gid_index: int | None = None,
    local_ip: str | None = None,
) -> Port:
    """Opens the requested port; of several, the one whose GID is `local_ip`, else the first.

    Raises RdmaUnavailableError, which says why there is no active port.
    """
    api = pyverbs("device")
    try:
        names = [os.fsdecode(found.name) for found in api.get_device_list()]
    except pyverbs("pyverbs_error").PyverbsError:  # this kernel has no RDMA at all
        names = []
    if device is not None and device not in names:
        raise RdmaUnavailableError(
            f"there is no RDMA device {device!r} here, only {', '.join(names) or 'none at all'}"
        )
    best: tuple[int, Port] | None = None
    contexts = []
    for name in names if device is None else [device]:
        with verbs_errors(f"opening {name}"):
            contexts.append(api.Context(name=name))
            for rank, found in _ports(contexts[-1], name, port, gid_index, local_ip):
                if best is None or rank > best[0]:
                    best = rank, found
    for context in contexts:
        if best is None or best[1].context is not context:
            context.close()
    if best is None:
        raise RdmaUnavailableError(
            f"no active port and GID on {device or ', '.join(names) or 'any RDMA device'}"
            f" (port={port}, gid={gid_index}); `rdma link` and `ibv_devinfo -v` show what there is"
        )
    logger.debug("rdma: %s port %d, GID %d: %s", *best[1][1:5])
    return best[1]


def _ports(
    context: Any, name: str, number: int | None, gid_index: int | None, local_ip: str | None
) -> Iterator[tuple[int, Port]]:
    """Yields each port with each of its GIDs, and how well it fits."""
    e = constants()
    gids = context.query_gid_table(1024)
    for i in range(1, context.query_device().phys_port_cnt + 1):
        attributes = context.query_port(i)
        if attributes.state != e.IBV_PORT_ACTIVE or number not in (None, i):
            continue
        is_ethernet = attributes.link_layer == e.IBV_LINK_LAYER_ETHERNET
        for entry in gids:
            if entry.port_num != i or gid_index not in (None, entry.gid_index):
                continue
            gid = str(context.query_gid(i, entry.gid_index))
            # (is RoCE v2, is an IPv4 address, is the one asked for)
            rank = (
                4 * (entry.gid_type == e.IBV_GID_TYPE_ROCE_V2)
                + 2 * gid.startswith("0000:0000:0000:0000:0000:ffff:")
                + 8 * (local_ip is not None and gid == _mapped(local_ip))
            )
            yield (
                rank,
                Port(
                    context=context,
                    device=name,
                    number=i,
                    gid_index=entry.gid_index,
                    gid=gid,
                    lid=attributes.lid,
                    mtu=attributes.active_mtu,
                    is_ethernet=is_ethernet,
                    max_message_bytes=attributes.max_msg_sz,
                ),
            )


def _mapped(ip: str) -> str:
    """Returns the GID of an IPv4 address; for anything else, a GID that no port has."""
    parts = ip.split(".")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        return ""
    a, b, c, d = (int(part) for part in parts)
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"
