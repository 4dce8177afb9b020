"""Some real faults of node processes; bench/nodes/node_faults.py has all of them and the
figures."""

from __future__ import annotations

import pytest

from bench.common.namespaces import can_have_namespaces
from bench.nodes.node_faults import Run, reference

pytestmark = pytest.mark.process

REASON = can_have_namespaces()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return reference(tmp_path_factory.mktemp("reference"))


def run_with_faults(run, kinds):
    try:
        for kind in kinds:
            run.inflict(kind)
    finally:
        run.close()
    assert run.check() == (0, 0)
    assert len(run.requests) > 3
    return {fault.kind: fault for fault in run.faults}


@pytest.mark.skipif(REASON is not None, reason=f"no network namespaces: {REASON}")
def test_faults_of_the_network(expected, tmp_path):
    run = Run(expected, tmp_path, num_nodes=2)
    faults = run_with_faults(run, ["cut_from", "reset", "corrupt"])
    assert 1.0 < faults["cut_from"].noticed_s < 3.0
    assert faults["reset"].noticed_s < 1.5


def test_a_process_that_dies_behind_shared_memory(expected, tmp_path):
    run = Run(expected, tmp_path, num_nodes=2, partition="request", sites=False)
    faults = run_with_faults(run, ["kill"])
    assert faults["kill"].noticed_s < 1.5
