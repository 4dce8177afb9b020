"""The engine of the fault simulation: its real loop, scheduler, K/V accounting, links and
recovery, driven step by step in virtual time."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import torch

from memory.attention.kv_layout import KVLayout
from memory.kv_beside_states import KVBesideStates
from memory.kv_manager import KVManager
from memory.nodes.attach import NodeLayout
from memory.nodes.new_token_attention import PlainNewTokenAttention
from memory.nodes.node_set import NodeSet, make_kv_managers
from memory.nodes.placement import PageGeometry, page_geometry
from memory.nodes.prompt_tail_cache import PromptTailCache
from memory.nodes.remote_attention import RemoteAttention
from memory.nodes.server.node import MemoryNode
from memory.nodes.wire import FULL_WIRE
from memory.pages.linux_vmm import LinuxMemory
from memory.partitioned_kv import PartitionedKV
from memory.prefix.index import PrefixHasher
from memory.states.layout import StateLayout
from memory.states.local import LocalStates, StatefulAttention
from ops import get_backend
from serve.engine.core import EngineCore
from serve.engine.node_recovery import NodeProber, NodeRecovery
from serve.engine.request_limits import RequestLimits
from serve.engine.request_table import RequestState
from serve.request import Request
from serve.runner.runner import ModelRunner
from serve.scheduler.admission import make_policy
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.step_plan import SchedulerLimits
from tests.support.nodes.remote_setup import make_partitions, template_of
from tests.support.nodes.sim_model import FIRST_TOKEN, NUM_TOKENS, STATE_LAYER, ExactModel, layers
from tests.support.nodes.sim_nodes import SimNode
from tests.support.nodes.sim_world import SequentialExecutor, SimEndpoint, World
from transport.direct import direct_pair

MAX_LEN = 160
MAX_RUNNING = 5
MAX_ROWS = 48
MAX_CHUNK = MAX_ROWS * 2 // 3
INTERVAL = 16
_WAIT_S = 0.02
_PROBE_S = 0.5


def geometry_of(partition: str, num_nodes: int) -> PageGeometry:
    token_bytes = [KVLayout(layers(), torch.float32).token_bytes]
    return page_geometry(token_bytes, [None], partition, num_nodes, 1 << 20)


class SimProber(NodeProber):
    """Probes nodes in virtual time, between two steps."""

    def __init__(self, nodes: NodeSet, world: World) -> None:
        super().__init__(nodes)
        self._world = world
        self._due_at: float | None = None

    def start(self) -> None:
        if self._due_at is None:
            self._back = frozenset()
            self._due_at = self._world.now + _PROBE_S

    def stop(self) -> None:
        self._due_at = None

    def work(self) -> None:
        if self._due_at is None or self._world.now < self._due_at:
            return
        missing = self._nodes.missing
        self._back = frozenset(self._nodes.find_returned())
        self._is_new = True
        self._world.owed_s = 0.0
        self._due_at = self._world.now + _PROBE_S if missing else None


class SimCore(EngineCore):
    """Has no threads; their work is called in turn."""

    def __init__(self, world: World, nodes: NodeSet, **settings) -> None:
        self.world = world
        self.prober = SimProber(nodes, world)

        def make_recovery(scheduler, end):
            partitions = settings["kv"].partitions
            return NodeRecovery(nodes, partitions, scheduler, end, world.clock, self.prober)

        super().__init__(
            make_recovery=make_recovery,
            clock=world.clock,
            tokenizer=SimpleNamespace(
                pieces=[b"x"] * (FIRST_TOKEN + NUM_TOKENS), special_ids=frozenset()
            ),
            eos_token_ids=frozenset(),
            compute=None,
            **settings,
        )
        # unbounded, since the queue is read only between steps
        self._output._records = queue.Queue()

    def _wait_for_memory(self) -> None:
        self.world.wait(_WAIT_S)

    def begin(self, prompt, params, sink, name) -> RequestState:
        state = RequestState(Request(name, None, (), params, self.world.now), sink)
        self._requests.add(state, lambda: None)
        self._prepare(state, prompt)
        return state

    def run_step(self) -> bool:
        """Processes messages and runs a step; returns whether there was work."""
        self._drain_inbox()
        self.prober.work()
        has_work = self._scheduler.has_work()
        if has_work:
            self._step()
        self._output.flush()
        while not self._output._records.empty():
            self._output._processor.process(self._output._records.get())
        self._drain_inbox()
        return has_work

    def idle(self) -> None:
        self._recovery.update_nodes()
        self.kv.trim()

    def check(self) -> None:
        self.kv.check_integrity()

    def finish(self) -> None:
        assert not self._requests.states(), "requests without an end"
        assert self.kv.num_in_use == 0
        if isinstance(self.kv, KVBesideStates):
            assert self.kv.records.num_in_use == 0
        self._prompt_pool.shutdown()
        self._close_memory()


class RandomMicrobatches:
    """A microbatch policy that chooses at random."""

    def __init__(self, world: World, probability: float) -> None:
        self._world = world
        self._share = probability

    def splits(self, num_decodes, num_prompt_rows):
        return self._world.random.random() < self._share

    def learn(self, *args):
        pass


class Records:
    """Records of states, in this machine's memory."""

    def __init__(self, num_records: int) -> None:
        layout = StateLayout([STATE_LAYER], INTERVAL)
        layout.pad(4096)
        self.memory = LinuxMemory(layout.record_bytes, num_records)
        self.kv = KVManager(
            self.memory,
            num_pages=num_records,
            num_ranges=MAX_RUNNING,
            max_model_len=MAX_LEN,
            groups=[layout.group()],
            max_rows=MAX_CHUNK,
            in_background=False,
        )
        address = self.memory.reserve(self.kv.total_bytes)
        self.states = LocalStates(layout, address, self.kv.total_bytes)


class SimEngine:
    """An engine over the nodes. local_pages: pages of its own memory, for when no node is left.
    num_records: of a model with states; 0: it has none."""

    def __init__(
        self,
        world: World,
        nodes: list[SimNode],
        partition: str,
        local_pages: int,
        num_records: int = 0,
    ) -> None:
        self.world = world
        by_url = {node.url: node for node in nodes}
        geometry = geometry_of(partition, len(nodes))
        self.template = template_of(
            geometry,
            layers(),
            [[0, 1]],
            engine=f"engine {world.random.random()}",
            max_len=MAX_LEN,
            num_ranges=MAX_RUNNING,
            num_pages=30_000,
            max_rows=MAX_ROWS,
            prefix_only=partition == "sequence",
        )
        partitions = make_partitions(by_url, partition, geometry, self.template)
        backend = get_backend("cpu")
        self.own = MemoryNode(local_pages * NodeLayout(self.template).page_bytes, backend)
        self.nodes = NodeSet(
            partitions,
            self.template,
            partition,
            lambda url, timeout_s: by_url[url].connect(timeout_s),
            local=self._attach_own if local_pages else None,
            clock=world.clock,
            pool=lambda count: SequentialExecutor(world),
        )
        for one in partitions:
            self.nodes.place(one, needs_all=True)
        managers = make_kv_managers(
            partitions,
            geometry,
            num_ranges=self.template.num_ranges,
            max_model_len=MAX_LEN,
            max_rows=self.template.max_rows,
        )
        self.nodes.min_pages = managers[0].pages_for(MAX_LEN)
        self.records = Records(num_records) if num_records else None
        if self.records is not None:
            self.kv = KVBesideStates(managers, self.records.kv)
        else:
            self.kv = managers[0] if len(managers) == 1 else PartitionedKV(managers)
        self.tail_cache = self._make_tail_cache()
        self.core = self._core(backend)

    def _attach_own(self):
        engine_end, node_end = direct_pair()
        self.own.adopt(node_end)
        return engine_end

    def _make_tail_cache(self) -> PromptTailCache | None:
        """Returns none, a small one or a large one, at random."""
        size_bytes = self.world.random.choice([0, 0, 64 << 10, 1 << 20])
        if not size_bytes:
            return None
        tail_cache = PromptTailCache(self.template, MAX_LEN, size_bytes)
        for partition in self.kv.partitions:
            partition.on_close = lambda target: tail_cache.drop(target.start)
        return tail_cache

    def close(self) -> None:
        self.core.finish()
        if self.tail_cache is not None:
            assert not self.tail_cache.num_pages_in_use
            self.tail_cache.close()
        if self.records is not None:
            self.records.memory.close()

    def _core(self, backend) -> SimCore:
        world, kv = self.world, self.kv
        attention = RemoteAttention(
            layers(),
            PlainNewTokenAttention(layers(), torch.float32, backend, self.tail_cache),
            backend,
            self.nodes,
            self.kv.layout.range_tokens,
            MAX_RUNNING,
            FULL_WIRE,
            self.tail_cache,
        )
        if self.records is not None:
            attention = StatefulAttention(attention, self.records.states, self.kv.record_start)
        runner = ModelRunner(
            ExactModel(has_states=self.records is not None),
            kv,
            attention,
            memory=self.nodes,
            microbatches=RandomMicrobatches(world, world.random.choice([0.0, 0.3, 1.0])),
            clock=world.clock,
        )
        policy = make_policy(
            world.random.choice(["worst_case", "prompt_only", "predicted"]), kv, MAX_ROWS
        )
        hasher = PrefixHasher(kv.page_end, b"secret") if world.random.random() < 0.7 else None
        return SimCore(
            world,
            self.nodes,
            runner=runner,
            scheduler=Scheduler(
                SchedulerLimits(MAX_RUNNING, MAX_ROWS, MAX_CHUNK), kv, policy, hasher
            ),
            kv=kv,
            limits=RequestLimits(MAX_LEN, FIRST_TOKEN + NUM_TOKENS, 1000, MAX_RUNNING),
        )

    def die(self) -> None:
        """Dies as by SIGKILL, without notifying the nodes."""
        for partition in self.nodes.partitions:
            for link in partition.links:
                if isinstance(link.endpoint, SimEndpoint):
                    link.endpoint.lose()
                    link.endpoint.other.lose_soon()
