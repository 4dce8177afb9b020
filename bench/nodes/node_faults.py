"""Real faults of memory nodes, at random times under load: python -m bench.nodes.node_faults

An engine process with the embedded model serves three streams without a pause. Its K/V is on
`serve node` processes in network namespaces (as root), or behind shm. Nodes are killed, stopped,
cut off, slowed down and restarted, and their messages are corrupted. The tokens that clients
receive are compared with those of an engine without nodes. The table shows the seconds until a
fault was noticed, and the longest gap between two tokens of a client around it.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.common.namespaces import Site, can_have_namespaces
from bench.nodes.fault_engine import NUM_PROMPTS
from bench.nodes.fault_rig import START_S, EngineProcess, Node, Proxy

logger = logging.getLogger(__name__)

_NOTICED_S = 2.0  # a fault is noticed by then, or never
GOALS = {"kill": 0.25, "stop_5": 1.5, "down": 1.5, "cut_both": 1.5, "cut_to": 1.5, "cut_from": 1.5}
"""Most seconds until a fault of a kind is noticed."""


@dataclass
class Fault:
    """A fault. at, ended, recovered: monotonic times of its begin, its end, and the moment when
    the engine had all pages again. noticed_s: seconds until the engine noticed it, None if it did
    not. gap_s: the longest gap between two tokens of a client, from `at` to `recovered`."""

    kind: str
    at: float
    ended: float = 0.0
    recovered: float = 0.0
    noticed_s: float | None = None
    gap_s: float = 0.0


def reference(folder: Path) -> list[list[int]]:
    """Returns the tokens with which an engine without nodes answers each prompt."""
    engine = EngineProcess({"nodes": []}, folder / "reference.log")
    engine.wait_for(lambda: len(engine.events_of("request")) == NUM_PROMPTS, 120, "reference")
    found = {event["prompt"]: event["tokens"] for event in engine.events_of("request")}
    engine.close()
    return [found[number] for number in range(NUM_PROMPTS)]


class Run:
    """Nodes, an engine over them, and their faults. sites: whether each node has a network
    namespace; without, nodes are behind shm."""

    def __init__(
        self,
        expected: list[list[int]],
        folder: Path,
        num_nodes: int = 3,
        partition: str = "auto",
        seed: int = 0,
        sites: bool = True,
    ) -> None:
        self.expected = expected
        self.random = random.Random(seed)
        self.folder = folder
        self.faults: list[Fault] = []
        self.requests: list[dict[str, Any]] = []  # of engines that have ended
        self.num_unanswered_leases = 0
        self.is_over_tcp = sites
        self._key_file = folder / "key"
        self._key_file.write_text("a secret of this bench alone\n")
        self._partition = partition
        self._sites = [Site(number) for number in range(num_nodes)] if sites else []
        self.nodes = [
            Node(n, folder, self._key_file, self._sites[n] if sites else None)
            for n in range(num_nodes)
        ]
        for node in self.nodes:
            node.start()
        self.proxy = Proxy(self._sites[0].address) if sites else None
        self.urls = [node.url for node in self.nodes]
        if self.proxy is not None:
            self.urls[0] = self.proxy.url
        try:
            self.engine = self._start_engine()
        except BaseException:
            self._close_nodes()
            raise
        self.all_pages = self.engine.pages

    def _start_engine(self) -> EngineProcess:
        settings = {
            "nodes": self.urls,
            "key_file": str(self._key_file),
            "partition": self._partition,
        }
        deadline = time.monotonic() + START_S
        while True:  # nodes may not listen yet
            engine = EngineProcess(settings, self.folder / "engine.log")
            try:
                engine.wait_for(engine.has_answered, 60, "start")
            except RuntimeError:
                engine.close()
                if time.monotonic() > deadline:
                    raise RuntimeError((self.folder / "engine.log").read_text()[-2000:]) from None
            else:
                return engine

    # ---- faults

    def kinds(self) -> dict[str, Callable[[Node], None]]:
        """Returns the functions that cause faults, by kind. Each returns when its fault has
        ended."""
        kinds: dict[str, Callable[[Node], None]] = {
            "kill": self._kill,
            "stop_1": lambda node: self._stop(node, 0.9),
            "stop_5": lambda node: self._stop(node, 5.0),
            "drain": self._drain,
            "rolling": lambda node: self._rolling(),
            "engine_kill": lambda node: self._engine_kill(),
        }
        if self.is_over_tcp:
            kinds |= {
                "cut_both": lambda node: self._cut(node, True, True),
                "cut_to": lambda node: self._cut(node, True, False),
                "cut_from": lambda node: self._cut(node, False, True),
                "cut_short": lambda node: self._cut(node, True, True, 0.4),
                "down": self._down,
                "slow": self._slow,
                "reset": lambda node: self._reset(),
                "corrupt": lambda node: self._corrupt(),
            }
        return kinds

    def _kill(self, node: Node) -> None:
        node.signal(signal.SIGKILL)
        node.wait()
        node.start()

    def _stop(self, node: Node, seconds: float) -> None:
        node.signal(signal.SIGSTOP)
        time.sleep(seconds)
        node.signal(signal.SIGCONT)

    def _drain(self, node: Node) -> None:
        node.signal(signal.SIGTERM)
        node.wait()
        node.start()

    def _rolling(self) -> None:
        for node in self.nodes:
            self._drain(node)
            time.sleep(1.0)

    def _engine_kill(self) -> None:
        self.engine.kill()
        self.requests += self.engine.events_of("request")
        self.engine.close()
        self.engine = self._start_engine()
        self.num_unanswered_leases += self.engine.pages < self.all_pages

    def _cut(self, node: Node, to_node: bool, from_node: bool, seconds: float = 2.0) -> None:
        assert node.site is not None
        node.site.cut(to_node, from_node)
        time.sleep(seconds)
        node.site.heal()

    def _down(self, node: Node) -> None:
        assert node.site is not None
        node.site.down()
        time.sleep(2.0)
        node.site.heal()

    def _slow(self, node: Node) -> None:
        assert node.site is not None
        node.site.slow("4mbit")
        time.sleep(2.0)
        node.site.heal()

    def _reset(self) -> None:
        assert self.proxy is not None
        self.proxy.reset()

    def _corrupt(self) -> None:
        assert self.proxy is not None
        self.proxy.corrupt(self.random.randrange(2), self.random.randrange(1 << 16))
        time.sleep(0.5)

    def inflict(self, kind: str) -> None:
        """Causes one fault and waits until the engine has all pages again. Raises RuntimeError if
        it does not recover, or if a request has failed."""
        time.sleep(self.random.random() * 0.5)
        fault = Fault(kind, time.monotonic())
        logger.info("%.3f %s", fault.at, kind)
        self.faults.append(fault)
        self.kinds()[kind](self.random.choice(self.nodes))
        fault.ended = time.monotonic()
        time.sleep(max(0.3, fault.at + _NOTICED_S - fault.ended))
        self.engine.wait_for(lambda: self.engine.pages >= self.all_pages, START_S, "recovery")
        fault.recovered = time.monotonic()
        noticed_at = self.engine.first_log_s("memory node", fault.at)
        fault.noticed_s = None if noticed_at is None else noticed_at - fault.at
        logger.info("%s: noticed after %s", kind, fault.noticed_s)
        for request in self.engine.events_of("request"):
            if request["error"] is not None:
                raise RuntimeError(f"a request has failed: {request['error']}")

    # ---- results

    def close(self) -> None:
        self.engine.close()
        self.requests += self.engine.events_of("request")
        self._close_nodes()

    def _close_nodes(self) -> None:
        for node in self.nodes:
            node.close()
        for site in self._sites:
            site.close()
        if self.proxy is not None:
            self.proxy.close()

    def check(self) -> tuple[int, int]:
        """Returns the number of requests with wrong or missing tokens, and of those that ended
        with an error. Sets the gaps of all faults. Call it after close."""
        wrong = failed = 0
        for request in self.requests:
            tokens = request["tokens"]
            expected = self.expected[request["prompt"]]
            if request["error"] is not None:
                failed += 1
                wrong += tokens != expected[: len(tokens)]
            else:
                wrong += tokens != expected
        for fault in self.faults:
            fault.gap_s = self._longest_gap(fault)
        return wrong, failed

    def _longest_gap(self, fault: Fault) -> float:
        """Returns the longest gap between two tokens of a client around a fault, in seconds."""
        longest = 0.0
        for request in self.requests:
            for earlier, later in pairwise(request["times"]):
                if later >= fault.at and earlier <= fault.recovered:
                    longest = max(longest, later - earlier)
        return longest


def table(faults: list[Fault]) -> str:
    lines = [
        f"{'fault':12} {'n':>4} {'noticed':>8} {'median s':>9} {'max s':>7} {'gap s':>7} {'max':>7}"
    ]
    for kind in sorted({fault.kind for fault in faults}):
        own = [fault for fault in faults if fault.kind == kind]
        times = [fault.noticed_s for fault in own if fault.noticed_s is not None]
        gaps = [fault.gap_s for fault in own]
        shown = f"{median(times):8.3f} {max(times):8.3f}" if times else f"{'-':>8} {'-':>8}"
        lines.append(
            f"{kind:12} {len(own):4} {len(times):8} {shown} {median(gaps):8.3f} {max(gaps):8.3f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--partition", default="auto")
    parser.add_argument("--shm", action="store_true", help="use shm in place of network namespaces")
    parser.add_argument("--kinds", default="", help="kinds of faults, with commas; all by default")
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="cause no fault after that time"
    )
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING)
    reason = None if args.shm else can_have_namespaces()
    if reason is not None:
        print(f"no network namespaces here: {reason}; --shm needs none")
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        run = Run(reference(path), path, args.nodes, args.partition, args.seed, sites=not args.shm)
        try:
            kinds = args.kinds.split(",") if args.kinds else sorted(run.kinds())
            for number in range(args.count):
                if time.monotonic() > began + args.seconds:
                    break
                run.inflict(kinds[number % len(kinds)])
        except BaseException:
            for event in run.engine.events_of("log")[-30:]:
                print(f"{event['at']:.3f} {event['text']}", file=sys.stderr)
            for log in sorted(Path(folder).glob("*.log")):
                print(log.name, log.read_text()[-1500:], sep="\n", file=sys.stderr)
            raise
        finally:
            run.close()
    wrong, failed = run.check()
    num_tokens = sum(len(request["tokens"]) for request in run.requests)
    print(table(run.faults))
    result = {
        "faults": len(run.faults),
        "requests": len(run.requests),
        "tokens": num_tokens,
        "failed": failed,
        "wrong": wrong,
        "leases_left": run.num_unanswered_leases,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(result))
    return 1 if wrong or failed or run.num_unanswered_leases else 0


if __name__ == "__main__":
    sys.exit(main())
