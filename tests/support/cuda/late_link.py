"""A link whose copies run as late as a GPU may run them, and models that are loaded over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.host_weights import cache, device_experts
from serve.loading.host_weights.cache import HostWeights
from serve.loading.host_weights.link import HostLink, Wait
from serve.loading.host_weights.placement import (
    DeviceNeeds,
    HostPlacement,
    LinkSpeeds,
    least_bytes,
    place,
)
from serve.loading.model_source import load_shard, read_source
from serve.models import Decoder
from serve.models.progress import LoadProgress
from serve.models.shard import WHOLE

_POISON = 0x5A
SPEEDS = LinkSpeeds(host=1e10, device=1e12, link=2e10)


class LateLink(HostLink):
    """A copy to the device runs when the device waits for it, behind those before. Until then its
    target holds something else, so that a layer that is used too early, or whose buffer is given
    away too early, shows in the results."""

    def __init__(self) -> None:
        self.num_fetched = 0
        self.is_closed = False
        self._waiting: deque[Callable[[], object]] = deque()

    def fetch(self, target: Tensor, source: Tensor) -> Wait:
        self.num_fetched += 1
        target.fill_(_POISON)
        self._waiting.append(lambda: target.copy_(source))
        last = self._waiting[-1]

        def wait() -> None:
            while last in self._waiting:
                self._waiting.popleft()()

        return wait

    def staging(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), _POISON, dtype=torch.uint8)

    def copied(self) -> Wait:
        pending = list(self._waiting)

        def join() -> None:
            while any(each in self._waiting for each in pending):
                self._waiting.popleft()()

        return join

    def close(self) -> None:
        self.is_closed = True


@contextmanager
def late_links(
    *, keeps_room: bool = False, min_rows: int | None = None
) -> Iterator[list[LateLink]]:
    """Yields a list that gets the links of the models that are loaded meanwhile. keeps_room: they
    leave room on the device for experts of the CPU; min_rows: of a step whose experts are copied.
    """
    made: list[LateLink] = []

    def open_late(device: torch.device) -> LateLink:
        made.append(LateLink())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "open_link", open_late)
        patch.setattr(cache, "measure_speeds", lambda link: SPEEDS)
        patch.setattr(cache, "folder_speed", lambda folder: 1e9)
        patch.setattr(device_experts, "rows_worth_copying", lambda *_: min_rows)
        if not keeps_room:
            patch.setattr(cache, "with_room", lambda *given: given[-1])
        yield made


def load_on_device(
    path: Path, dtype: str, budget: int | None, host: int | None = None, **settings: Any
) -> Decoder:
    """Loads a model for the CUDA back end with at most so many bytes of weights on the device, and
    in host memory."""
    settings |= {"backend": "cuda", "dtype": dtype, "max_model_len": 64, "host_weight_bytes": host}
    source = read_source(EngineConfig(str(path), **settings))
    return load_shard(source._replace(weight_budget=budget), LoadProgress(), WHOLE)


def host_weights(model: Decoder) -> HostWeights:
    stream = model.weights.stream
    assert isinstance(stream, HostWeights)
    return stream


def needs_of_model(path: Path, dtype: str) -> DeviceNeeds:
    """Returns what a model takes on the device."""
    found: list[DeviceNeeds] = []

    def noting(needs: DeviceNeeds, *limits: Any) -> HostPlacement:
        found.append(needs)
        return place(needs, *limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "place", noting)
        patch.setattr(cache, "measure_speeds", lambda link: SPEEDS)
        with pytest.raises(ConfigError, match="is too little"):
            load_on_device(path, dtype, 1)
    return found[0]


def ring_budget(path: Path, dtype: str) -> int:
    """Returns the least budget with which a model is served."""
    return least_bytes(needs_of_model(path, dtype))


def experts_budget(path: Path, dtype: str, num_on_cpu: int) -> int:
    """Returns a budget for which so many mixtures have to leave the device, and no other layer."""
    needs = needs_of_model(path, dtype)
    experts = [each.experts for each in needs.layers if each.experts]
    return needs.total - sum(experts[len(experts) - num_on_cpu :])
