"""int4 K/V without recent tokens in int8, as beside other machines, in an engine that is alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def one_store() -> Iterator[None]:
    """Lets engines that are started meanwhile keep all tokens of int4 K/V in 4 bits alone."""
    with patch("serve.loading.kv_layouts.keeps_recent", lambda *_: False):
        yield
