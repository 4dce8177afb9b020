"""Many engine requests of one call, without keeping the event loop from other calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from serve.request import Prompt

if TYPE_CHECKING:
    from serve.engine.engine import RequestStream

SLICE = 8  # each takes some tenths of a millisecond


async def submit_each(
    prompts: Sequence[Prompt], request_id: str, submit: Callable[[Prompt, str], RequestStream]
) -> list[RequestStream]:
    """One engine request for each prompt, under names of their own; all or none, also if the
    client leaves meanwhile. Others have their turn after every SLICE."""
    streams: list[RequestStream] = []
    try:
        for position, prompt in enumerate(prompts):
            if position and position % SLICE == 0:
                await asyncio.sleep(0)
            name = request_id if position == 0 else f"{request_id}-{position}"
            streams.append(submit(prompt, name))
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return streams
