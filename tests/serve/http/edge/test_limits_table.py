"""The table of limits is complete, agrees with the settings and is in the documentation."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from aiohttp import web_protocol

from serve.http.edge import limits
from tests.support.http.limits_table import PAGE, TABLE, Limit, default_of, with_table

ALL = [limit for section in TABLE.values() for limit in section]
# These limit the operator's files or the server's own output, not the input of clients.
NOT_OF_CLIENTS = {
    "serve.http.calls.context:MAX_LOGGED_NAMES",
    "serve.http.edge.cors:MAX_AGE_S",
    "serve.http.edge.errors:MAX_QUOTED",
    "serve.http.schema.fields:MAX_LISTED",
    "serve.http.schema.fields:MAX_WARNED",
    "serve.http.edge.keys:MAX_FILE_BYTES",
    "serve.http.edge.keys:MAX_KEYS",
    "serve.http.monitoring.live:MAX_BEHIND",
    "serve.http.monitoring.live:MAX_SEQUENCES",
    "serve.http.monitoring.live:MAX_STEPS",
    "serve.http.edge.connection:MAX_LOG_TEXTS",
    "serve.http.edge.counters:MAX_REASONS",
}
# limits of serve.sampling_params, which other modules list under their own names
ALIASED = ("LOGPROBS", "BAD_WORDS", "BAD_WORD_LENGTH", "ALLOWED_TOKEN_IDS")


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page


@pytest.mark.parametrize("limit", ALL, ids=lambda limit: limit.constant)
def test_a_limit_is_positive_and_the_default_of_its_setting(limit: Limit) -> None:
    assert limit.value > 0
    assert default_of(limit) in (None, limit.value)


def test_no_constant_is_missing() -> None:
    """Each MAX_ constant of a module that reads requests, and each of limits.py, has a row."""
    listed = {limit.constant for limit in ALL} | NOT_OF_CLIENTS
    defined = set()
    folders = (Path("serve/http"), Path("serve/chat"))
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    for path in [*paths, Path("serve/sampling_params.py")]:
        module = ".".join(path.with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            defined |= {f"{module}:{name}" for name in names if name.startswith("MAX_")}
    aliases = {f"serve.sampling_params:MAX_{name}" for name in ALIASED}
    assert defined - listed - aliases == set()
    constants = {f"serve.http.edge.limits:{name}" for name in vars(limits) if name.isupper()}
    assert constants - listed == {"serve.http.edge.limits:KIB", "serve.http.edge.limits:MIB"}


def test_the_pipelining_limit_is_that_of_aiohttp() -> None:
    assert web_protocol.MAX_MSG_QUEUE_SIZE == limits.PIPELINED
