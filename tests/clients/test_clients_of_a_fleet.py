"""Client libraries against a hop before two servers whose connections are cut again and again."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.cluster.cut_proxy import CutProxy
from serve.cluster.front.front import FrontSettings
from serve.cluster.front.front_thread import FrontThread
from serve.http.edge.settings import HttpSettings
from tests.clients.test_clients import (
    ENVIRONMENTS,
    SCRIPTS,
    TIMEOUT_S,
    formats,  # noqa: F401
    variables,  # noqa: F401
    wait_until_ready,
)
from tests.support.http.serve_process import serve_run

pytestmark = pytest.mark.process

LIBRARIES = [("openai3", "openai"), ("openai3", "anthropic"), ("openai3", "langchain_openai")]
WHOLE_S, CUT_S = 0.7, 0.1


@contextmanager
def cut_in_turn(ports: list[int]) -> Iterator[tuple[list[str], list[int]]]:
    """Yields the URLs of proxies before these ports, of which one at a time is cut for a moment,
    and a list that has an entry for each cut."""
    loop, cuts = asyncio.new_event_loop(), []
    proxies = [CutProxy(port) for port in ports]

    async def cut() -> None:
        while True:
            for number, proxy in enumerate(proxies):
                await asyncio.sleep(WHOLE_S)
                await proxy.cut()
                cuts.append(number)
                await asyncio.sleep(CUT_S)
                await proxy.heal()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    for proxy in proxies:
        asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(5)
    cutting = asyncio.run_coroutine_threadsafe(cut(), loop)
    try:
        yield [proxy.url for proxy in proxies], cuts
    finally:
        cutting.cancel()
        for proxy in proxies:
            asyncio.run_coroutine_threadsafe(proxy.stop(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize(("environment", "name"), LIBRARIES)
def test_a_library_notices_nothing(
    environment: str,
    name: str,
    variables: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    if not (ENVIRONMENTS / environment / ".installed").exists():
        pytest.skip(f"{ENVIRONMENTS / environment} is not installed: make clients")
    with ExitStack() as stack:
        urls = [stack.enter_context(serve_run())[1] for _ in range(2)]
        for url in urls:
            wait_until_ready(url)
        ports = [int(url.rpartition(":")[2]) for url in urls]
        proxied, cuts = stack.enter_context(cut_in_turn(ports))
        front = FrontThread(FrontSettings(tuple(proxied)), HttpSettings(port=0))
        front.start()
        stack.callback(front.stop)
        done = subprocess.run(
            [
                str(ENVIRONMENTS / environment / "bin" / "python"),
                str(SCRIPTS / f"{name}_checks.py"),
            ],
            cwd=tmp_path,
            env=variables | {"CLIENTS_ROOT": front.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"\n{done.stdout[-12_000:]}"
        assert len(cuts) >= 2
