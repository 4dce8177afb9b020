"""Mistakes in the words of the API that was spoken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from serve.errors import RequestError


@contextmanager
def parameters_named(names: Mapping[str, str]) -> Iterator[None]:
    """Inside, a RequestError that names one of our parameters comes out with the API's name."""
    try:
        yield
    except RequestError as exc:
        if exc.param not in names:
            raise
        ours, theirs = exc.param, names[exc.param]
        message = re.sub(rf"\b{ours}\b", theirs, str(exc))
        raise RequestError(message, param=theirs, code=exc.code) from exc
