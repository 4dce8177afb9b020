"""Several simulated servers behind the hop's own decisions."""

from __future__ import annotations

import itertools
import statistics

import pytest

from bench.simulate.fleet import FleetCall, FleetSimulation, HandOver, Way
from bench.simulate.settings import PoolDelays, SimulationSettings
from memory.pages.layer_groups import LayerGroup
from serve.config import EngineConfig
from serve.scheduler.step_time import StepWork

HAND_OVER = HandOver(0.02, 1e-5)


class Cost:
    """10 ms a step, and 1 ms for each row of a prompt."""

    def seconds(self, work: StepWork) -> float:
        return 0.01 + 0.001 * (work.num_rows - work.num_decodes)


def simulation(way: Way) -> FleetSimulation:
    config = EngineConfig(
        max_model_len=2048, kv_cache_bytes=1 << 28, kv_page_bytes=1 << 16, max_num_seqs=32
    )
    groups = (LayerGroup(token_bytes=1024, tile_tokens=16),)
    settings = SimulationSettings(config, groups, PoolDelays(0.005, 0.0, 0.001))
    return FleetSimulation(Cost(), settings, HAND_OVER, way)


def evenly(rate: float, count: int, prompt: int, output: int) -> list[FleetCall]:
    return [FleetCall(number / rate, prompt, output) for number in range(count)]


@pytest.mark.parametrize("way", ["merged", "apart", "auto"])
def test_every_call_gets_its_tokens_in_order(way: Way) -> None:
    calls = evenly(1.0, 40, 300, 64)
    for call, record in zip(calls, simulation(way).run(calls), strict=True):
        assert record.call == call and len(record.times) == call.num_output
        assert record.times == sorted(record.times) and record.ttft_s > 0.3


def test_a_single_call() -> None:
    call = FleetCall(0.0, 256, 5)
    (merged,) = simulation("merged").run([call])
    assert merged.ttft_s == pytest.approx(0.005 + 0.01 + 0.256 + 0.001)
    assert merged.tpot_s == pytest.approx(0.01)
    (parted,) = simulation("apart").run([call])
    more_s = 0.02 + 256e-5 + 0.01  # the hand-over, and the first step at the second server
    assert parted.ttft_s == pytest.approx(merged.ttft_s + more_s)
    assert parted.tpot_s == pytest.approx(0.01)


@pytest.mark.parametrize("way", ["merged", "auto"])
def test_idle_days_between_calls_take_no_time(way: Way) -> None:
    simulated = simulation(way)
    replica = simulated._replicas.replicas[0]
    records = simulated.run(evenly(1e-5, 3, 256, 5))
    assert replica.num_checks < 500, "not two a second"
    assert [r.ttft_s for r in records] == pytest.approx([0.272] * 3)


def test_prompts_stall_the_streams_that_are_beside_them() -> None:
    calls = evenly(2.0, 30, 256, 128)
    merged, parted = (simulation(way).run(calls) for way in ("merged", "apart"))
    assert max(record.tpot_s for record in parted) == pytest.approx(0.01, rel=0.01)
    assert max(record.tpot_s for record in merged) > 0.011


def test_roles_begin_where_they_pay_and_only_there() -> None:
    long = simulation("auto")
    long.run(evenly(1.5, 120, 512, 512))
    assert long.parting.num_prefill == 1 and long.parting.counts.num_moved > 40
    short = simulation("auto")
    short.run(evenly(3.0, 120, 512, 16))
    assert short.parting.num_prefill == 0 and short.parting.counts.num_moved < 12


def test_servers_that_have_run_for_a_while_know_their_steps() -> None:
    """A hop begins before such servers; new ones would answer the first calls merged."""
    calls = evenly(1.5, 30, 512, 512)
    new = simulation("auto")
    new.run(calls)
    assert new.parting.counts.num_together["unlearned"] > 0
    config = EngineConfig(
        max_model_len=2048, kv_cache_bytes=1 << 28, kv_page_bytes=1 << 16, max_num_seqs=32
    )
    settings = SimulationSettings(config, (LayerGroup(token_bytes=1024, tile_tokens=16),))
    kinds = [FleetCall(0.0, 512, 32)]
    warm = FleetSimulation(Cost(), settings, HAND_OVER, "auto", warm_up=kinds)
    records = warm.run(calls)
    assert "unlearned" not in warm.parting.counts.num_together
    assert records[0].ttft_s == pytest.approx(0.53, abs=0.02), "the clock begins afterwards"


def test_a_call_that_two_servers_get_at_once_has_no_gap() -> None:
    """Its tokens all come from the second server; of those that move, the second one is late."""
    parted = simulation("auto")
    records = parted.run(evenly(1.5, 120, 512, 512))
    assert parted.parting.counts.num_moved > 40
    late = [max(b - a for a, b in itertools.pairwise(record.times)) for record in records[-20:]]
    assert statistics.median(late) < HAND_OVER.seconds(512)


def test_several_servers_compute_prompts() -> None:
    config = EngineConfig(
        max_model_len=2048, kv_cache_bytes=1 << 28, kv_page_bytes=1 << 16, max_num_seqs=32
    )
    settings = SimulationSettings(config, (LayerGroup(token_bytes=1024, tile_tokens=16),))
    calls = evenly(3.0, 30, 512, 16)
    slow, fast = (
        FleetSimulation(Cost(), settings, HAND_OVER, "apart", 4, num_prefill=number).run(calls)
        for number in (1, 2)
    )
    assert slow[-1].ttft_s > 5.0 > 1.0 > fast[-1].ttft_s
