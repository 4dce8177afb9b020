"""Experts of the CPU: when they look at rows that come from a device, and what rows they take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.backend import Routing
from serve.loading.host_weights.experts import HostExperts, HostRows
from serve.loading.host_weights.link import HostLink, Wait

ROWS, TOP_K, SIZE, EXPERTS = 3, 2, 8, 4


class LoggedLink(HostLink):
    """What is copied from the device is there when it has been waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def mark(self) -> Wait:
        self.log.append("begin")
        return lambda: self.log.append("wait")


class Op:
    """Adds to each row the numbers of its experts."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.fails = False

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        assert residual is None
        assert int(routing.experts.min()) >= 0 and int(routing.experts.max()) < EXPERTS
        self.log.append("compute")
        if self.fails:
            raise RuntimeError("an operator fails")
        return x + routing.experts.sum(1, keepdim=True)


def routing_of(experts: list[int], rows: int = ROWS) -> Routing:
    return Routing(
        torch.tensor(experts, dtype=torch.int32).expand(rows, -1), torch.ones(rows, TOP_K)
    )


def made() -> tuple[HostExperts, LoggedLink, Op]:
    link = LoggedLink()
    op = Op(link.log)
    return HostExperts(op, EXPERTS, HostRows(link)), link, op


@pytest.mark.parametrize("is_begun", [True, False])
def test_rows_are_waited_for_before_they_are_computed(is_begun: bool) -> None:
    experts, link, _ = made()
    x, routing, residual = torch.ones(ROWS, SIZE), routing_of([1, 2]), torch.ones(ROWS, SIZE)
    if is_begun:
        experts.begin(x, routing)
        assert link.log == ["begin"]
    assert torch.equal(experts(x, routing, residual), torch.full((ROWS, SIZE), 5.0))
    assert link.log == ["begin", "wait", "compute"]


def test_rows_of_no_sequence_may_name_any_expert() -> None:
    experts, _, _ = made()
    x = torch.full((ROWS, SIZE), float("nan"))
    assert experts(x, routing_of([-7, 1000])).shape == x.shape


def test_layers_share_the_memory_and_steps_may_grow() -> None:
    link = LoggedLink()
    rows = HostRows(link)
    layers = [HostExperts(Op(link.log), EXPERTS, rows) for _ in range(2)]
    for count in (2, 5, 1, 0):
        for number, layer in enumerate(layers):
            x = torch.full((count, SIZE), float(number))
            found = layer(x, routing_of([number, 3], count))
            assert torch.equal(found, torch.full((count, SIZE), 3.0 + 2 * number))
    assert [each.num_rows for each in layers] == [8, 8]


def test_a_step_that_failed_leaves_no_rows_behind() -> None:
    experts, _, op = made()
    old, new = torch.zeros(ROWS, SIZE), torch.ones(ROWS, SIZE)
    experts.begin(old, routing_of([0, 0]))  # what is computed beside the experts fails
    experts.begin(new, routing_of([0, 1]))
    assert torch.equal(experts(new, routing_of([0, 1])), torch.full((ROWS, SIZE), 2.0))
    op.fails = True
    with pytest.raises(RuntimeError, match="an operator fails"):
        experts(old, routing_of([0, 0]))
    op.fails = False
    more = torch.ones(ROWS + 1, SIZE)
    assert torch.equal(experts(more, routing_of([0, 1], ROWS + 1)), more + 1)
