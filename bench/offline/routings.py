"""Notes which experts the rows of each step drew, without work while steps run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bench.common.model_cost import Drawn
from ops.backend import Router, Routing
from ops.cpu.backend import CpuBackend
from serve.engine.step_trace import TracedStep


class RoutingLog:
    """The routings of the CPU back end in the order of its calls. num_mixtures: the calls of one
    step, one for each layer with a mixture."""

    def __init__(self, num_mixtures: int) -> None:
        self._num_mixtures = num_mixtures
        self._calls: list[Tensor] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Notes all routings of this process while it is open."""
        plain, calls = CpuBackend.route, self._calls

        def route(backend: CpuBackend, x: Tensor, router: Router) -> Routing:
            routing = plain(backend, x, router)
            if len(router.weight) > 1:  # else it is the gate of a shared MLP
                calls.append(routing.experts)
            return routing

        setattr(CpuBackend, "route", route)  # noqa: B010  a type checker allows no assignment
        try:
            yield
        finally:
            setattr(CpuBackend, "route", plain)  # noqa: B010

    def clear(self) -> None:
        """Forgets all routings. No step may run."""
        self._calls.clear()

    def drawn(self, steps: Sequence[TracedStep]) -> list[Drawn] | None:
        """Returns the different experts in each mixture of each step, for all steps since `clear`;
        None if the calls are not those of the steps, as on another back end."""
        number = self._num_mixtures
        if not number or len(self._calls) % number:
            return None
        passes = iter(range(0, len(self._calls), number))
        found: list[Drawn] = []
        for step in steps:
            # a pass whose step was taken back has no row in the trace
            rows = step.work.num_rows
            at = next((at for at in passes if len(self._calls[at]) == rows), None)
            if at is None:
                return None
            calls = self._calls[at : at + number]
            found.append([len(torch.unique(experts)) for experts in calls])
        return found
