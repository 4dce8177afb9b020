"""Random fault schedules over memory nodes in virtual time; a seed determines its schedule.

    python -m tests.support.nodes.sim_faults --count 1000          # seeds 0 to 999
    python -m tests.support.nodes.sim_faults --seed 17 --verbose   # one of them, with a log

Requests start and are cancelled at random while nodes are killed, stopped, cut off, slow, full,
draining, or send and get messages that no transport would deliver. At the end every client has the
tokens of a fault-free run, each once, the K/V accounting is consistent, and nodes lease no memory.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import torch

from memory.nodes.attach import NodeLayout
from ops import get_backend
from serve.sampling_params import SamplingParams
from tests.support.nodes.sim_clients import Client, Sink
from tests.support.nodes.sim_engine import MAX_LEN, SimEngine, geometry_of
from tests.support.nodes.sim_model import FIRST_TOKEN, NUM_TOKENS
from tests.support.nodes.sim_nodes import Recorder, SimNode
from tests.support.nodes.sim_world import SimEndpoint, World

_SPAN_S = 6.0  # requests and faults begin in this time
_MOST_S = 150.0  # limit of a run, in virtual time
_GOOD_S = 3.0  # a node that has been available for so long has been found
_AFTER_S = 60.0  # until nodes have noticed everything


class Run:
    """One fault schedule."""

    def __init__(
        self,
        seed: int,
        report: Callable[[str], None] = lambda text: None,
        *,
        partition: str | None = None,
        num_nodes: int | None = None,
        local_factor: int | None = None,
        node_factor: float | None = None,
        has_states: bool = False,
    ) -> None:
        """local_factor and node_factor: how many sequences of full length fit in the engine's
        own memory and in that of one node. Arguments that are None are drawn at random."""
        self.world = World(seed)
        self.random = random.Random(seed + 1)
        self.other_random = random.Random(f"starved {seed}")  # so that older schedules stay
        self.report = report
        self.counts: Counter[str] = Counter()
        choose = self.random.choice
        self.partition = partition or choose(["head", "head", "request", "sequence"])
        count = num_nodes or choose([1, 2, 2, 3, 3, 4])
        pages = geometry_of(self.partition, count)
        most = -(-MAX_LEN // pages.page_tokens[0])
        self.pages_needed = most
        backend = get_backend("cpu")
        self.nodes: list[SimNode] = []
        if local_factor is None:
            local_factor = choose([0, 1, 4])
        self.local_pages = most * local_factor
        if node_factor is None:
            is_sharded = count > 1 and self.partition != "request"
            node_factor = choose([1, 2, 5, 0.7 if is_sharded else 1])
        self.node_pages = max(1, int(most * node_factor))
        capacity = self.node_pages * pages.page_bytes
        for number in range(count):
            self.nodes.append(SimNode(self.world, f"sim://{number}", capacity, backend))
        self.has_states = has_states
        num_records = self.other_random.choice([3, 5, 8, 40]) if has_states else 0
        self.engine = SimEngine(
            self.world, self.nodes, self.partition, self.local_pages, num_records
        )
        self.clients: list[Client] = []
        self.num_open_faults = 0
        self.problems: list[str] = []

    def note(self, what: str, text: str = "") -> None:
        self.counts[what] += 1
        self.report(f"{self.world.now:8.3f} {what} {text}")

    def is_excused(self, client: Client, error: str | None) -> bool:
        """Whether a request may end with this error, since there was too little memory."""
        if error is None or "too small" not in error:
            return self._has_none()
        num_good = len(self._available())
        num_pages = self.node_pages * (
            min(1, num_good) if self.partition == "request" else num_good
        )
        need = self.engine.kv.pages_for(len(client.prompt) + client.num_tokens)
        return need > max(num_pages - 1, self.local_pages) or self._has_none()

    def _has_none(self) -> bool:
        return self.local_pages < self.pages_needed and not self._available()

    def _available(self) -> list[SimNode]:
        """Returns the nodes that have been available for a while."""
        since = self.world.now - _GOOD_S
        return [n for n in self.nodes if n.good_since is not None and n.good_since <= since]

    # ---- requests

    def plan_requests(self) -> None:
        shared = [self._token() for _ in range(90)]
        for number in range(self.random.randint(3, 9)):
            length = self.random.randint(1, 100)
            num_tokens = self.random.randint(1, 30)
            prompt = shared[: self.random.choice([0, 0, 35, 70, 90])][:length]
            prompt += [self._token() for _ in range(length - len(prompt))]
            client = Client(prompt, num_tokens, self.has_states)
            self.clients.append(client)
            at = self.random.random() * _SPAN_S
            self.world.after(at, lambda c=client, n=number: self._begin(c, n))
            if self.random.random() < 0.15:
                later = self.random.random() * 2
                self.world.after(at + later, lambda c=client: self._cancel(c))

    def _token(self) -> int:
        return FIRST_TOKEN + self.random.randrange(NUM_TOKENS)

    def _begin(self, client: Client, number: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=client.num_tokens, seed=number)
        sink = Sink(client, self.world.clock, self.is_excused, self.problems)
        client.state = self.engine.core.begin(client.prompt, params, sink, f"r{number}")

    def _cancel(self, client: Client) -> None:
        if client.reason is None and client.state is not None:
            client.is_cancelled = True
            self.engine.core.abort(client.state)

    # ---- faults

    def plan_faults(self) -> None:
        faults = [
            self._kill,
            self._stop,
            self._cut,
            self._slow,
            self._reset,
            self._hold,
            self._flip,
            self._mutate,
            self._fill,
            self._drain,
            self._hang,
            self._rolling,
        ]
        weights = [3, 3, 3, 2, 2, 2, 2, 4, 1, 2, 0.3, 0.7]
        for _ in range(self.random.randint(1, 7)):
            fault = self.random.choices(faults, weights)[0]
            node = self.random.choice(self.nodes)
            self.world.after(self.random.random() * _SPAN_S, lambda f=fault, n=node: f(n))
        if self.other_random.random() < 0.15:
            node = self.other_random.choice(self.nodes)
            at = self.other_random.random() * _SPAN_S
            self.world.after(at, lambda: self._starve(node, self.other_random.randint(2, 8)))

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        self.num_open_faults += 1

        def end() -> None:
            self.num_open_faults -= 1
            act()

        self.world.after(seconds, end)

    def _seconds(self) -> float:
        return self.random.choice([0.1, 0.4, 1.0, 1.5, 2.5, 5.0, 12.0]) * self.random.random()

    def _kill(self, node: SimNode) -> None:
        self.note("kill", node.url)
        node.kill()
        self._later(self._seconds(), lambda: self._start(node))

    def _start(self, node: SimNode) -> None:
        self.note("start", node.url)
        node.start()

    def _stop(self, node: SimNode) -> None:
        self.note("stop", node.url)
        node.stop()
        self._later(self._seconds(), node.resume)

    def _starve(self, node: SimNode, times: int) -> None:
        """The node is short of processor time: it is stopped and continued again and again."""
        self.note("starve", node.url)
        node.stop()

        def resume() -> None:
            node.resume()
            if times:
                running_s = self.other_random.uniform(0.05, 3.0)
                self._later(running_s, lambda: self._starve(node, times - 1))

        self._later(self.other_random.uniform(0.1, 2.0), resume)

    def _cut(self, node: SimNode) -> None:
        directions = self.random.choice([(True, True), (True, False), (False, True)])
        self.note("cut", f"{node.url} to, from: {directions}")
        node.cut(*directions)
        self._later(self._seconds(), node.heal)

    def _slow(self, node: SimNode) -> None:
        before = node.delay_s, node.service_s
        node.delay_s = self.random.choice([0.005, 0.05, 0.25])
        node.service_s = self.random.choice([0.0003, 0.01, 0.1])
        self.note("slow", f"{node.url} {node.delay_s} {node.service_s}")

        def end() -> None:
            node.delay_s, node.service_s = before

        self._later(self._seconds(), end)

    def _hang(self, node: SimNode) -> None:
        self.note("hang", node.url)
        node.hang()
        self._later(self.random.random() * 40, node.recover)

    def _reset(self, node: SimNode) -> None:
        self.note("reset", node.url)
        node.reset_connections()

    def _hold(self, node: SimNode) -> None:
        ends = node.hold()
        if ends is not None:
            self.note("zombie", node.url)
            self._later(self._seconds(), lambda: node.unhold(ends))

    def _flip(self, node: SimNode) -> None:
        if (ends := node.newest()) is not None:
            self.note("corrupt", node.url)
            ends[self.random.randrange(2)].flip = True

    def _mutate(self, node: SimNode) -> None:
        if (ends := node.newest()) is None:
            return
        recorder = Recorder(self.random)
        end = ends[self.random.random() < 0.4]
        kind = self.random.choice(["truncated", "twice", "older_epoch", "garbage", "replayed"])
        self.note(kind, f"{node.url} {'from' if end is ends[1] else 'to'} it")
        end.mutate = getattr(recorder, kind)
        if kind == "replayed":
            end.mutate = recorder.keep
            self._later(self.random.random() * 0.3, lambda: self._replay(end, recorder))

    @staticmethod
    def _replay(end: SimEndpoint, recorder: Recorder) -> None:
        end.mutate = recorder.replayed

    def _fill(self, node: SimNode) -> None:
        page_bytes = NodeLayout(self.engine.template).page_bytes
        left = self.random.choice([0, 1, self.pages_needed]) * page_bytes
        self.note("fill", f"{node.url} but {left}")
        node.kill()
        node.start()
        node.fill(self.engine.template, left)
        self._later(self._seconds(), node.empty)

    def _drain(self, node: SimNode) -> None:
        self.note("drain", node.url)
        node.drain()

        def end() -> None:
            node.kill()
            self._later(self._seconds(), lambda: self._start(node))

        self._later(self.random.random() * 4, end)

    def _rolling(self, _: SimNode) -> None:
        self.note("rolling")
        for number, node in enumerate(self.nodes):
            at = number * (0.5 + self.random.random())
            self._later(at, node.drain)
            self._later(at + 0.4, node.kill)
            self._later(at + 0.4 + self.random.random(), lambda n=node: self._start(n))

    # ---- the run

    def go(self) -> None:
        self.plan_requests()
        self.plan_faults()
        self.work(lambda: all(client.reason is not None for client in self.clients))
        self.end()

    def work(self, is_over: Callable[[], bool]) -> None:
        """Runs the engine's loop until is_over."""
        core, world = self.engine.core, self.world
        while not is_over():
            assert world.now < _MOST_S, "the run does not end"
            if core.run_step():
                world.wait(self.random.choice([0.002, 0.01, 0.03]))
            else:
                core.idle()
                world.wait(0.05)
            if self.random.random() < 0.05:
                core.check()
                core.stats()  # as metrics requests do, also when there is no memory
        core.check()

    def end(self) -> None:
        """Closes everything and checks the final state."""
        assert not self.problems, self.problems
        self.counts["error"] += sum(client.error is not None for client in self.clients)
        for client in self.clients:
            client.check()
        if self.random.random() < 0.3:
            self.engine.die()
        self.engine.close()
        self._check_nodes()

    def _check_nodes(self) -> None:
        self.world.wait(_AFTER_S)
        assert not self.num_open_faults
        for node in self.nodes:
            node.heal()
            node.empty()
        self.world.wait(5.0)
        assert not self.engine.own.stats().bytes_leased, "the engine's own memory is leased"
        for node in self.nodes:
            assert not node.bytes_leased, f"{node.url} has {node.bytes_leased} bytes leased"
            node.kill()

    @property
    def longest_gap_s(self) -> float:
        gaps = [
            later - earlier for client in self.clients for earlier, later in pairwise(client.times)
        ]
        return max(gaps, default=0.0)


def run_schedule(
    seed: int, report: Callable[[str], None] = lambda text: None, *, has_states: bool = False
) -> Run:
    """Runs a schedule; its errors name the seed."""
    run = Run(seed, report, has_states=has_states)
    try:
        run.go()
    except Exception as error:
        states = " --states" if has_states else ""
        command = f"python -m tests.support.nodes.sim_faults --seed {seed} --verbose{states}"
        error.add_note(f"schedule {seed}: {command}")
        raise
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--states", action="store_true", help="of a model with states")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.CRITICAL)
    totals: Counter[str] = Counter()
    failed: list[int] = []
    began = time.monotonic()
    for seed in range(args.seed, args.seed + args.count):
        try:
            report = print if args.verbose else lambda text: None
            run = run_schedule(seed, report, has_states=args.states)
        except Exception as error:
            if args.count == 1:
                raise
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            continue
        totals += run.counts
        totals["requests"] += len(run.clients)
        totals["tokens"] += sum(len(client.got) for client in run.clients)
    print(f"{args.count} schedules in {time.monotonic() - began:.1f} s, {len(failed)} failed")
    print(", ".join(f"{name} {count}" for name, count in sorted(totals.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
