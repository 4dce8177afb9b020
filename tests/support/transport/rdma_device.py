"""A fixture that skips a test without an RDMA device."""

from __future__ import annotations

import os

import pytest

from transport.verbs import RdmaUnavailableError, open_port


@pytest.fixture
def device():
    """Skips where there is no device; where one is promised, that is a failure."""
    try:
        open_port().context.close()
    except RdmaUnavailableError as error:
        if os.environ.get("TRANSPORT", "").startswith("rdma"):
            raise
        pytest.skip(str(error))
