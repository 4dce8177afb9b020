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
        ours = exc.param or ""
        if ours not in names:
            raise
        theirs = names[ours]
        message = re.sub(rf"(?<!the )\b{ours}\b", theirs, str(exc))  # "the prompt" is no name
        raise RequestError(message, param=theirs, code=exc.code) from exc
