"""/metrics on a real engine: every name, what it counts, and what reads it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from serve import Engine
from serve.http import HttpServer, HttpSettings
from serve.http.app import ServerState
from serve.http.monitoring.metric_table import SECTIONS
from tests.support.engine.checkpoints import checkpoint

NAME = 'a "name"'
DOCS = Path(__file__).parents[4] / "docs"
BODY = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 9, "ignore_eos": True}
Check = Callable[[HttpServer, aiohttp.ClientSession], Awaitable[None]]


def with_server(check: Check, **settings: Any) -> None:
    async def main() -> None:
        engine = Engine(str(checkpoint("llama")), served_model_name=NAME, max_num_seqs=4)
        async with (
            HttpServer(engine, HttpSettings(port=0, **settings)) as server,
            aiohttp.ClientSession(server.url) as session,
            asyncio.timeout(30),
        ):
            await check(server, session)

    uvloop.run(main())


async def text_of(session: aiohttp.ClientSession, url: str = "/metrics") -> str:
    async with session.get(url) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain")
        assert response.headers["x-request-id"]
        return await response.text()


async def figures(session: aiohttp.ClientSession) -> dict[Any, float]:
    """By name and the values of the labels that are not of all."""
    found = {}
    for family in text_string_to_metric_families(await text_of(session)):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith(("vllm:", "mergestep:")):
                assert labels.pop("model_name") == NAME
            if sample.name.startswith("vllm:"):
                assert labels.pop("engine") == "0"
            found[sample.name, *labels.values()] = sample.value
    return found


async def complete(session: aiohttp.ClientSession, **changes: Any) -> dict[str, Any]:
    async with session.post("/v1/completions", json={**BODY, **changes}) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


def test_figures_follow_the_engine() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        before = await figures(session)
        assert before["mergestep:step_rows_total", "decode"] == 0
        assert before["vllm:num_requests_running",] == 0
        await complete(session)
        after = await figures(session)
        assert after["mergestep:step_rows_total", "prefill"] == 3
        assert after["mergestep:step_rows_total", "decode"] == 8
        assert after["mergestep:steps_total",] == 9 and after["mergestep:mixed_steps_total",] == 0
        assert after["mergestep:step_time_seconds_count",] == 9
        assert after["mergestep:sequences_finished_total",] == 1
        assert after["mergestep:kv_pages", "in_use"] == 0
        assert after["mergestep:kv_pages", "total"] > 0
        assert after["mergestep:connections",] == 1
        for prefix in ("vllm", "mergestep"):
            assert after[f"{prefix}:kv_cache_usage_perc",] == 0
            assert after[f"{prefix}:prefix_cache_queries_total",] == 3
            assert after[f"{prefix}:prompt_tokens_total",] == 3
            assert after[f"{prefix}:generation_tokens_total",] == 9
            assert after[f"{prefix}:request_success_total", "length"] == 1
            assert after[f"{prefix}:request_success_total", "stop"] == 0
            assert after[f"{prefix}:inter_token_latency_seconds_count",] == 8
            assert after[f"{prefix}:request_generation_tokens_bucket", "16.0"] == 1
            assert after[f"{prefix}:request_generation_tokens_bucket", "8.0"] == 0
            assert after[f"{prefix}:request_params_max_tokens_sum",] == 9
            assert after[f"{prefix}:iteration_tokens_total_sum",] == 11
        assert after["http_requests_total", "/v1/completions", "POST", "2xx"] == 1

    with_server(check)


def test_who_runs_and_who_waits() -> None:
    """The engine runs four sequences at once."""

    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        core, go_on = server.app.context.engine.loaded.core, threading.Event()
        calls = [asyncio.create_task(complete(session, max_tokens=200)) for _ in range(7)]
        # the same number may wait before all have come
        while ((now := core.stats()).num_running, now.num_waiting) != (4, 3):
            await asyncio.sleep(0)
        core.run_in_loop(go_on.wait)  # between two steps
        try:
            told = await figures(session)
        finally:
            go_on.set()
        found = told["vllm:num_requests_running",], told["vllm:num_requests_waiting",]
        assert found == (4, 3)
        await asyncio.gather(*calls)

    with_server(check)


def test_times_of_a_request_add_up() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        body = json.dumps(BODY).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        port = int(server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body[:9])
        while not server.app.context.calls:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.15)
        writer.write(body[9:])
        assert await reader.readexactly(12) == b"HTTP/1.1 200"
        writer.close()
        seen = {key[0]: value for key, value in (await figures(session)).items() if len(key) == 1}
        seconds = {
            name: seen[f"vllm:{name}_seconds_sum"]
            for name in (
                "time_to_first_token",
                "e2e_request_latency",
                "request_queue_time",
                "request_prefill_time",
                "request_decode_time",
                "request_inference_time",
                "inter_token_latency",
                "request_time_per_output_token",
            )
        }
        assert seconds["time_to_first_token"] > 0.12, "it begins when the head has come"
        parts = [seconds[f"request_{part}_time"] for part in ("queue", "prefill", "decode")]
        assert sum(parts) == pytest.approx(seconds["e2e_request_latency"])
        assert sum(parts[1:]) == pytest.approx(seconds["request_inference_time"])
        assert sum(parts[:2]) == pytest.approx(seconds["time_to_first_token"])
        assert seconds["inter_token_latency"] == pytest.approx(parts[2])
        assert seconds["request_time_per_output_token"] == pytest.approx(parts[2] / 8)

    with_server(check)


def test_answers_count_one_by_one_and_a_prompt_once() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        usage = []
        for changes in ({"n": 3}, {"prompt": [[5, 6], [7, 8, 9]]}, {"stop": "e", "max_tokens": 90}):
            usage.append((await complete(session, **changes))["usage"])
        seen = await figures(session)
        assert seen["vllm:prompt_tokens_total",] == sum(u["prompt_tokens"] for u in usage)
        assert seen["vllm:generation_tokens_total",] == sum(u["completion_tokens"] for u in usage)
        tokens = seen["vllm:request_generation_tokens_sum",]
        assert tokens == sum(u["completion_tokens"] for u in usage)
        assert seen["vllm:e2e_request_latency_seconds_count",] == 6
        assert seen["vllm:request_params_n_sum",] == 3 + 1 + 1 + 1
        ended = [v for key, v in seen.items() if key[0] == "vllm:request_success_total"]
        assert sum(ended) == 6 and seen["vllm:request_success_total", "abort"] == 0

    with_server(check)


def test_refusals_and_aborts_are_counted() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        for path, body in (("/v1/completions", {**BODY, "model": "x"}), ("/nowhere", {})):
            async with session.post(path, json=body) as response:
                assert response.status == 404
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(complete(session, max_tokens=200, n=4), 0.03)
        while True:  # a reading may fall between the end of one sequence and the next
            seen = await figures(session)
            ended = seen["vllm:request_success_total", "abort"]
            if ended and not seen["vllm:num_requests_running",]:
                break
            await asyncio.sleep(0.01)
        assert seen["mergestep:requests_refused_total", "model_not_found"] == 1
        assert seen["mergestep:requests_refused_total", "unknown_url"] == 1
        assert seen["http_requests_total", "/v1/completions", "POST", "4xx"] == 2
        assert seen["http_requests_total", "", "POST", "4xx"] == 1
        assert seen["mergestep:kv_pages", "in_use"] == 0
        assert seen["mergestep:pool_queue_length", "tokenize"] == 0
        for pool in ("tokenize", "compute", "output"):
            assert 0 < seen["mergestep:pool_busy_seconds_total", pool] < 10
        while not (await figures(session))["mergestep:event_loop_lag_seconds_count",]:
            await asyncio.sleep(0.02)

    with_server(check)


def test_grammars_are_compiled_once() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        for words in (["fox", "owl"], ["fox", "owl"], ["bee"], ["fox", "owl"]):
            answer = await complete(session, guided_choice=words, ignore_eos=False, max_tokens=50)
            assert answer["choices"][0]["text"] in words
        seen = await figures(session)
        assert seen["mergestep:structured_output_requests_total", "miss"] == 2
        assert seen["mergestep:structured_output_requests_total", "hit"] == 2
        assert seen["mergestep:structured_output_cached_grammars",] == 2
        assert seen["mergestep:structured_output_cache_bytes",] > 1000

    with_server(check)


def test_vllm_names_can_be_left_out() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        text = await text_of(session)
        assert "mergestep:time_to_first_token_seconds_bucket" in text
        assert "vllm:" not in text and "\nhttp_requests_total" not in text

    with_server(check, vllm_metrics=False)


@pytest.mark.row("A11")
def test_a_port_of_its_own() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        async with session.get("/metrics") as response:
            assert response.status == 404
        assert server.metrics is not None
        url = f"http://127.0.0.1:{server.metrics.port}"
        assert "vllm:num_requests_running" in await text_of(session, f"{url}/metrics?x=1")
        async with session.get(f"{url}/v1/models") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "unknown_url"
        async with session.post(f"{url}/metrics") as response:
            assert response.status == 405 and response.headers["Allow"] == "GET"
        async with session.get(f"{url}/metrics", headers={"Host": "evil.example"}) as response:
            assert response.status == 400, "a page of somebody else must not read it"
        server.app.state = ServerState.LOADING
        async with session.get(f"{url}/metrics") as response:
            assert response.status == 503 and response.headers["Retry-After"]

    with_server(check, metrics_port=0)


def test_readings_at_once_are_one() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        texts = await asyncio.gather(*[text_of(session) for _ in range(20)])
        assert len(set(texts)) < 20

    with_server(check)


# ---- what is written about the names


def names_of(text: str) -> set[str]:
    """Returns the names of families as Prometheus writes them: a counter with _total."""
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
    }


@pytest.fixture(scope="module")
def exposition() -> str:
    found = []

    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        await complete(session)
        async with session.get("/nowhere"):
            pass
        found.append(await text_of(session))

    with_server(check)
    return found[0]


def test_the_docs_name_every_figure(exposition: str) -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    written = set(re.findall(r"^\| `([\w:]+)`", page, flags=re.M))
    aliases = set(re.findall(r"^\| `[\w:]+` \| `([\w:]+)` \|", page, flags=re.M))
    ours = {name for name in names_of(exposition) if not name.startswith("process_")}
    assert written | aliases == ours
    for figures_of in SECTIONS.values():
        for figure in figures_of:
            assert figure.about.replace("|", "&#124;") in page, figure.name


def test_the_dashboard_asks_only_for_what_is_there(exposition: str) -> None:
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    samples = {
        (sample.name, *sorted(sample.labels))
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }
    labels_of: dict[str, set[str]] = {}
    for name, *labels in samples:
        labels_of.setdefault(name, set()).update(labels)
    families = names_of(exposition)
    used = set()
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len(panels) >= 20
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            for name, matchers in re.findall(
                r"((?:vllm|mergestep):\w+|http_requests_total)(?:\{([^}]*)\})?", target["expr"]
            ):
                family = re.sub(r"_(bucket|sum|count)$", "", name)
                assert name in families or family in families, (panel["title"], name)
                used.add(family if name not in families else name)
                if name in labels_of:
                    asked = set(re.findall(r"(\w+)\s*=", matchers))
                    assert asked <= labels_of[name], (panel["title"], name)
    assert {name.partition(":")[0] for name in used} >= {"vllm", "mergestep"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    kinds = {variable["type"] for variable in board["templating"]["list"]}
    assert "datasource" in kinds
