"""A stream whose server is gone goes on where its K/V is copied, if that is predicted to pay."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from bench.cluster.cut_proxy import CutProxy
from bench.cluster.streams import StreamCall, ask
from memory.prefix.sequence_names import SequenceNames
from serve.cluster.front.answer_log import AnswerLog, JournalError
from serve.cluster.front.front import Front, FrontSettings
from serve.cluster.front.held import Held, rest_s
from serve.cluster.front.replicas import LOAD_HEADER, Replica, ReplicaSet
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.engine.engine import Engine
from serve.http import HttpServer, HttpSettings
from serve.machine import free_port
from serve.runner.runner import ModelRunner, StepResult
from tests.serve.cluster.front.test_apart import LOAD, load
from tests.serve.cluster.front.test_relay import DONE, STATE, Script, ScriptedServer, streams

MODEL = EngineConfig(model=DEFAULT_MODEL).model_name


def replicas(*, routing: str = "prefix", **more: Any) -> ReplicaSet:
    """Three servers, which can all pull from one another, and whose prompts take 2.4 s for 1,024
    tokens, and pulls 0.1 s."""
    found = ReplicaSet([f"http://{name}" for name in "abc"], lost_after_s=1.0, routing=routing)
    for replica, name in zip(found.replicas, "abc", strict=True):
        replica.is_ready = True
        replica.load = load(engine=name, pulls_from=["a", "b", "c"], **more)
    return found


def chosen(found: ReplicaSet, held: Held, names: list[bytes] | None = None) -> str:
    choice = found.choose_next(names or [], (), held)
    assert choice is not None
    return choice.replica.url[-1]


def test_the_server_with_the_copies_goes_on() -> None:
    for name in "abc":
        assert chosen(replicas(), Held(1024, 900, name, 1000)) == name
    assert chosen(replicas(), Held(1024, 900)) == "a"
    assert chosen(replicas(), Held(1024, 900, "d", 1000)) == "a", "it is not there"


def test_a_queue_there_is_weighed_against_pulling_and_computing() -> None:
    found, held = replicas(), Held(1024, 900, "c", 1000)
    found.replicas[2].queue_s = 0.08  # pulling takes the others 0.1 s
    assert chosen(found, held) == "c"
    found.replicas[2].sent_s = 0.0
    found.replicas[2].queue_s = 0.13
    assert chosen(found, held) == "a"
    for replica in found.replicas:  # nobody pulls: computing takes 2.3 s
        replica.load = load(engine=replica.url[-1], pulls_from=[])
        replica.sent_s = 0.0
    found.replicas[2].queue_s = 2.0
    assert chosen(found, held) == "c"
    found.replicas[2].queue_s = 2.5
    assert chosen(found, held) in "ab"


def test_streams_of_one_server_do_not_all_go_to_the_same_one() -> None:
    found = replicas()
    for replica in found.replicas[:2]:  # which have to compute what c has copied
        replica.load = load(engine=replica.url[-1], pulls_from=[])
    turns = [chosen(found, Held(1124, 1000, "c", 1024)) for _ in range(30)]
    assert turns[0] == "c" and turns.count("c") > 15 and set(turns) == set("abc")


def test_the_server_that_computed_the_prompt_has_it() -> None:
    held = Held(1024, 1000, "c", 16, prompt_at="http://b")
    assert chosen(replicas(), held) == "b"
    found = replicas()
    names = [bytes([n]) for n in range(8)]
    found.take(found.replicas[1], names, 0.0)
    assert chosen(found, Held(1024, 1000), names) == "b", "it has answered the same beginning"


def test_servers_that_have_learned_nothing() -> None:
    assert chosen(replicas(steps=[], prompts=[]), Held(1024, 900, "c", 1000)) == "c"


@pytest.mark.parametrize("routing", ["least-busy", "round-robin"])
def test_other_ways_do_not_look_at_copies(routing: str) -> None:
    assert chosen(replicas(routing=routing), Held(1024, 900, "c", 1000)) == "a"


def test_a_server_that_tells_nothing() -> None:
    found = replicas()
    found.replicas[1].load = None
    assert chosen(found, Held(1024, 900, "c", 1000)) == "a"


def test_what_is_left_to_do() -> None:
    one = load()
    assert rest_s(one, 1024, 0, 0) == pytest.approx(2.4)
    assert rest_s(one, 1024, 1024, 0) == 0.0
    assert rest_s(one, 1024, 256, 0) == pytest.approx(1.8)
    assert rest_s(one, 1024, 0, 1024) == pytest.approx(0.1)
    assert rest_s(one, 1024, 256, 1024) == pytest.approx(0.07)
    slow = load(prompts=[[1024, 2.4, 9.0]])
    assert rest_s(slow, 1024, 0, 1024) == pytest.approx(2.4), "computing is faster"
    assert rest_s(load(num_streams=1, slowdown=2.0), 1024, 0, 0) == pytest.approx(4.8)


@pytest.mark.parametrize("record", [b"no", b"[]", b'["a"]', b'[1,"a"]', b'["a",-1]', b'{"a":1}'])
def test_a_malformed_record_of_copies(record: bytes) -> None:
    with pytest.raises(JournalError):
        AnswerLog().feed(b": copied " + record + b"\n\n")


class Peer(ScriptedServer):
    """One of the engines a, b and c."""

    def __init__(self, name: str, *scripts: Script) -> None:
        super().__init__(*scripts)
        self._name = name

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            told = LOAD | {"engine": self._name, "pulls_from": ["a", "b", "c"]}
            return web.Response(headers={LOAD_HEADER: orjson.dumps(told).decode()})
        return await super()._answer(request)


def copied_by(*names: str) -> Script:
    """Says one after the other where its K/V is copied, sends a token, and dies."""

    async def script(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        state = orjson.loads(STATE[8:]) | {"num_tokens": 1000}
        await response.write(b": state " + orjson.dumps(state) + b"\n\n")
        await response.write(b"data: 1\n\n: tokens [0,[1],null]\n\n")
        for name in names:
            await response.write(b": copied " + orjson.dumps([name, 1000]) + b"\n\n")
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    return script


@pytest.mark.parametrize(
    ("names", "end"), [((), "b"), (("b",), "b"), (("b", "c"), "c"), (("c", ""), "b")]
)
def test_a_stream_says_where_it_is_copied(names: tuple[str, ...], end: str) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = [Peer("a", copied_by(*names))]
            servers += [Peer(name, streams(2, end=DONE)) for name in "bc"]
            for server in servers:
                await server.start(stack)
            urls = tuple(server.url for server in servers)
            settings = FrontSettings(urls, prefill_apart="off")
            front = await stack.enter_async_context(Front(settings, HttpSettings(port=0)))
            front.replicas.replicas[2].num_calls += 1  # so that b is the next one otherwise
            session = await stack.enter_async_context(aiohttp.ClientSession())
            body = {"prompt": "a" * 100, "stream": True}
            async with session.post(front.url + "/v1/completions", json=body) as response:
                assert await response.read() == b"data: 1\n\ndata: 2\n\n" + DONE
            assert [len(server.bodies) for server in servers] == [1, end == "b", end == "c"]
            assert front.counts.num_at_copies == bool(names and names[-1])
            async with session.get(front.url + "/metrics") as response:
                told = f"front_continued_at_copies_total {front.counts.num_at_copies}\n"
                assert told in await response.text()

    asyncio.run(main())


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("a secret of sixteen bytes or more")
    path.chmod(0o600)
    return path


async def peers(stack: AsyncExitStack, key_file: Path, count: int) -> list[HttpServer]:
    """Starts engines that keep copies of one another's pages."""
    urls = [f"tcp://127.0.0.1:{free_port()}" for _ in range(count)]
    servers = []
    for url in urls:
        engine = Engine(
            DEFAULT_MODEL,
            dtype="int8",
            max_model_len=768,
            max_num_seqs=8,
            kv_listen=url,
            kv_peers=urls,
            kv_peer_key_file=str(key_file),
            kv_replica_bytes=64 << 20,
        )
        servers.append(await stack.enter_async_context(HttpServer(engine, HttpSettings(port=0))))
    async with asyncio.timeout(30):
        for server in servers:
            while len((server.app.context.engine.load_report() or {})["pulls_from"]) < count - 1:
                await asyncio.sleep(0.02)
    return servers


def copied_pages(server: HttpServer) -> int:
    stats = server.app.context.engine.stats().kv_peers
    assert stats is not None and stats.copies is not None
    return stats.copies.pages


class HeldSteps:
    """Lets the first steps of all engines run, and later ones only once `go_on` is set: what comes
    beside a stream comes before its end, however busy the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_free: int) -> None:
        self.go_on = threading.Event()
        self._num_left = num_free
        run = ModelRunner.run

        def held(runner: ModelRunner, *args: Any) -> StepResult:
            self._num_left -= 1
            if self._num_left < 0:
                self.go_on.wait(30)
            return run(runner, *args)

        monkeypatch.setattr(ModelRunner, "run", held)


def test_real_engines_name_the_copier_and_it_goes_on(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = SequenceNames.__init__
    monkeypatch.setattr(
        SequenceNames, "__init__", lambda *a, **k: init(*a, **(k | {"min_age_s": 0.0}))
    )
    monkeypatch.setattr("serve.http.calls.continuation._COPIED_S", 0.0)
    monkeypatch.setattr("memory.peers.copying.NEWS_S", 0.005)
    monkeypatch.setattr("memory.peers.copying.SHARE", 0.5)
    steps = HeldSteps(monkeypatch, num_free=200)
    call = StreamCall(
        "/v1/completions",
        {"model": MODEL, "prompt": "Once upon a time " * 8, "max_tokens": 600, "stream": True}
        | {"temperature": 0, "ignore_eos": True},
    )

    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = await peers(stack, key_file, 3)
            proxies = [CutProxy(int(server.url.rpartition(":")[2])) for server in servers]
            for proxy in proxies:
                await proxy.start()
                stack.push_async_callback(proxy.stop)
            urls = tuple(proxy.url for proxy in proxies)
            settings = FrontSettings(urls, prefill_apart="off")
            front = await stack.enter_async_context(Front(settings, HttpSettings(port=0)))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            asking = asyncio.create_task(ask(session, front.url, call))
            first = await first_of(front.replicas.replicas)
            at = front.replicas.replicas.index(first)
            try:
                async with asyncio.timeout(20):
                    while sum(map(copied_pages, servers)) < 4:
                        assert not asking.done(), "it is over too soon"
                        await asyncio.sleep(0.002)
                pages = [copied_pages(server) for server in servers]
                await proxies[at].cut()
            finally:
                steps.go_on.set()
            found, expected = await asking, await ask(session, servers[at].url, call)
            assert not found.error and found.said == expected.said
            copier = max(range(3), key=lambda n: pages[n])
            assert copier != at and front.counts.num_at_copies == 1
            counts = [replica.last_chosen for replica in front.replicas.replicas]
            assert counts[copier] == max(counts)

    asyncio.run(main())


async def first_of(all_of_them: list[Replica]) -> Replica:
    async with asyncio.timeout(10):
        while True:
            for replica in all_of_them:
                if replica.num_streams:
                    return replica
            await asyncio.sleep(0.001)
