"""/metrics on a real engine: its values, its documentation and the dashboard that reads it."""

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


async def get_text(session: aiohttp.ClientSession, url: str = "/metrics") -> str:
    async with session.get(url) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain")
        assert response.headers["x-request-id"]
        return await response.text()


async def read_metrics(session: aiohttp.ClientSession) -> dict[Any, float]:
    """Returns each value by its name and labels, without the labels that all metrics have."""
    numbers = {}
    for family in text_string_to_metric_families(await get_text(session)):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith(("vllm:", "mergestep:")):
                assert labels.pop("model_name") == NAME
            if sample.name.startswith("vllm:"):
                assert labels.pop("engine") == "0"
            numbers[sample.name, *labels.values()] = sample.value
    return numbers


async def complete(session: aiohttp.ClientSession, **changes: Any) -> dict[str, Any]:
    async with session.post("/v1/completions", json={**BODY, **changes}) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


def test_metrics_follow_the_engine() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        before = await read_metrics(session)
        assert before["mergestep:step_rows_total", "decode"] == 0
        assert before["vllm:num_requests_running",] == 0
        await complete(session)
        after = await read_metrics(session)
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


def test_running_and_waiting_requests() -> None:
    """The engine runs four sequences at once, so three of seven requests wait."""

    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        core, resume = server.app.context.engine.loaded.core, threading.Event()
        calls = [asyncio.create_task(complete(session, max_tokens=200)) for _ in range(7)]
        # only both numbers together show that all requests have arrived
        while ((stats := core.stats()).num_running, stats.num_waiting) != (4, 3):
            await asyncio.sleep(0)
        core.run_in_loop(resume.wait)  # stops the engine between two steps
        try:
            values = await read_metrics(session)
        finally:
            resume.set()
        numbers = values["vllm:num_requests_running",], values["vllm:num_requests_waiting",]
        assert numbers == (4, 3)
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
        values = {
            key[0]: value for key, value in (await read_metrics(session)).items() if len(key) == 1
        }
        seconds = {
            name: values[f"vllm:{name}_seconds_sum"]
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
        assert seconds["time_to_first_token"] > 0.12, "the time starts with the head of the request"
        parts = [seconds[f"request_{part}_time"] for part in ("queue", "prefill", "decode")]
        assert sum(parts) == pytest.approx(seconds["e2e_request_latency"])
        assert sum(parts[1:]) == pytest.approx(seconds["request_inference_time"])
        assert sum(parts[:2]) == pytest.approx(seconds["time_to_first_token"])
        assert seconds["inter_token_latency"] == pytest.approx(parts[2])
        assert seconds["request_time_per_output_token"] == pytest.approx(parts[2] / 8)

    with_server(check)


def test_a_prompt_counts_once_and_each_answer_counts() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        usage = []
        for changes in ({"n": 3}, {"prompt": [[5, 6], [7, 8, 9]]}, {"stop": "e", "max_tokens": 90}):
            usage.append((await complete(session, **changes))["usage"])
        values = await read_metrics(session)
        assert values["vllm:prompt_tokens_total",] == sum(item["prompt_tokens"] for item in usage)
        assert values["vllm:generation_tokens_total",] == sum(
            item["completion_tokens"] for item in usage
        )
        tokens = values["vllm:request_generation_tokens_sum",]
        assert tokens == sum(item["completion_tokens"] for item in usage)
        assert values["vllm:e2e_request_latency_seconds_count",] == 6
        assert values["vllm:request_params_n_sum",] == 3 + 1 + 1 + 1
        num_finished = [
            value for key, value in values.items() if key[0] == "vllm:request_success_total"
        ]
        assert sum(num_finished) == 6 and values["vllm:request_success_total", "abort"] == 0

    with_server(check)


def test_refusals_and_aborts_are_counted() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        for path, body in (("/v1/completions", {**BODY, "model": "x"}), ("/nowhere", {})):
            async with session.post(path, json=body) as response:
                assert response.status == 404
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(complete(session, max_tokens=200, n=4), 0.03)
        while True:  # one scrape may show only some of the sequences as aborted
            values = await read_metrics(session)
            num_finished = values["vllm:request_success_total", "abort"]
            if num_finished and not values["vllm:num_requests_running",]:
                break
            await asyncio.sleep(0.01)
        assert values["mergestep:requests_refused_total", "model_not_found"] == 1
        assert values["mergestep:requests_refused_total", "unknown_url"] == 1
        assert values["http_requests_total", "/v1/completions", "POST", "4xx"] == 2
        assert values["http_requests_total", "", "POST", "4xx"] == 1
        assert values["mergestep:kv_pages", "in_use"] == 0
        assert values["mergestep:pool_queue_length", "tokenize"] == 0
        for pool in ("tokenize", "compute", "output"):
            assert 0 < values["mergestep:pool_busy_seconds_total", pool] < 10
        while not (await read_metrics(session))["mergestep:event_loop_lag_seconds_count",]:
            await asyncio.sleep(0.02)

    with_server(check)


def test_grammars_are_compiled_once() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        for words in (["fox", "owl"], ["fox", "owl"], ["bee"], ["fox", "owl"]):
            answer = await complete(session, guided_choice=words, ignore_eos=False, max_tokens=50)
            assert answer["choices"][0]["text"] in words
        values = await read_metrics(session)
        assert values["mergestep:structured_output_requests_total", "miss"] == 2
        assert values["mergestep:structured_output_requests_total", "hit"] == 2
        assert values["mergestep:structured_output_cached_grammars",] == 2
        assert values["mergestep:structured_output_cache_bytes",] > 1000

    with_server(check)


def test_counted_prompts_and_embeddings_are_no_answers_with_tokens() -> None:
    """A prompt that is only counted is no finished answer, and an embedding has no first token."""

    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        await complete(session, max_tokens=0)
        numbers = await read_metrics(session)
        assert numbers["vllm:request_success_total", "length"] == 0
        assert numbers["vllm:e2e_request_latency_seconds_count",] == 0
        assert numbers["vllm:request_prompt_tokens_count",] == 0
        body = {"model": NAME, "input": [5, 6, 7]}
        async with session.post("/v1/embeddings", json=body) as response:
            assert response.status == 200
        numbers = await read_metrics(session)
        assert numbers["vllm:request_success_total", "length"] == 1
        assert numbers["vllm:time_to_first_token_seconds_count",] == 0
        assert numbers["vllm:prompt_tokens_total",] == 3
        await complete(session)
        numbers = await read_metrics(session)
        assert numbers["vllm:time_to_first_token_seconds_count",] == 1

    with_server(check)


def test_the_vllm_names_can_be_off() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        text = await get_text(session)
        assert "mergestep:time_to_first_token_seconds_bucket" in text
        assert "vllm:" not in text and "\nhttp_requests_total" not in text

    with_server(check, vllm_metrics=False)


@pytest.mark.row("A11")
def test_a_separate_port() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        async with session.get("/metrics") as response:
            assert response.status == 404
        assert server.metrics is not None
        url = f"http://127.0.0.1:{server.metrics.port}"
        assert "vllm:num_requests_running" in await get_text(session, f"{url}/metrics?x=1")
        async with session.get(f"{url}/v1/models") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "unknown_url"
        async with session.post(f"{url}/metrics") as response:
            assert response.status == 405 and response.headers["Allow"] == "GET"
        async with session.get(f"{url}/metrics", headers={"Host": "evil.example"}) as response:
            assert response.status == 400, "pages of other hosts must not read metrics"
        server.app.state = ServerState.LOADING
        async with session.get(f"{url}/metrics") as response:
            assert response.status == 503 and response.headers["Retry-After"]

    with_server(check, metrics_port=0)


def test_concurrent_scrapes_share_one_reading() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        texts = await asyncio.gather(*[get_text(session) for _ in range(20)])
        assert len(set(texts)) < 20

    with_server(check)


# ---- the documentation and the dashboard


def names_of(text: str) -> set[str]:
    """Returns the names of metric families; counters have the suffix _total."""
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
    }


@pytest.fixture(scope="module")
def exposition() -> str:
    texts = []

    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        await complete(session)
        async with session.get("/nowhere"):
            pass
        texts.append(await get_text(session))

    with_server(check)
    return texts[0]


def test_the_documentation_has_every_metric(exposition: str) -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    page = page.partition("## Several models")[0]  # the rest is the front's
    documented = set(re.findall(r"^\| `([\w:]+)`", page, flags=re.M))
    aliases = set(re.findall(r"^\| `[\w:]+` \| `([\w:]+)` \|", page, flags=re.M))
    exposed = {name for name in names_of(exposition) if not name.startswith("process_")}
    assert documented | aliases == exposed
    for metrics in SECTIONS.values():
        for metric in metrics:
            assert metric.about.replace("|", "&#124;") in page, metric.name


def test_the_documentation_has_everything_that_is_kept(exposition: str) -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| [^`|]+ \| `(\w+)` \|", page, flags=re.M))
    families = {family.name: family for family in text_string_to_metric_families(exposition)}
    sizes = {s.labels["what"]: s.value for s in families["mergestep:kept_bytes"].samples}
    entries = {s.labels["what"] for s in families["mergestep:kept_entries"].samples}
    # those that exist with a setting or after a request that needs them
    assert documented - set(sizes) == {"grammars", "spans", "kv_events"}
    assert set(sizes) == entries <= documented
    assert sizes["kv_pages"] > 0 and sizes["metric_labels"] > 1000


def test_what_is_kept_follows_the_requests() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        before = await read_metrics(session)
        text = "a b c " * 5
        for number in range(3):
            body = {"model": NAME, "input": text * (number + 1), "max_output_tokens": 16}
            async with session.post("/v1/responses", json=body) as response:
                assert response.status == 200, await response.text()
        await complete(session, guided_choice=["fox", "owl"], ignore_eos=False, max_tokens=50)
        after = await read_metrics(session)
        assert after["mergestep:kept_entries", "responses"] == 3
        assert 3 << 10 < after["mergestep:kept_bytes", "responses"] < 30_000
        assert after["mergestep:kept_entries", "grammars"] == 1
        for what in ("kv_pages", "prefix_index", "length_predictor"):
            name = "mergestep:kept_bytes", what
            assert after[name] > before[name], what
        assert after["mergestep:worker_memory_bytes", "grammar"] > 1 << 20
        assert after["mergestep:memory_bytes", "anonymous"] > 1 << 20
        assert after["mergestep:heap_bytes", "in_use"] > 1 << 20
        assert after["mergestep:python_blocks",] > 10_000

    with_server(check)


@pytest.mark.parametrize("board", ["grafana.json", "grafana-fleet.json"])
def test_a_dashboard_queries_existing_metrics(exposition: str, board: str) -> None:
    dashboard = json.loads((DOCS / board).read_text(encoding="utf-8"))
    samples = {
        (sample.name, *sorted(sample.labels))
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }
    labels_of: dict[str, set[str]] = {}
    for name, *labels in samples:
        labels_of.setdefault(name, set()).update(labels)
    families = names_of(exposition)
    queried = set()
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) >= 20
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            for name, matchers in re.findall(
                r"((?:vllm|mergestep):\w+|http_requests_total)(?:\{([^}]*)\})?", target["expr"]
            ):
                family = re.sub(r"_(bucket|sum|count)$", "", name)
                assert name in families or family in families, (panel["title"], name)
                queried.add(family if name not in families else name)
                if name in labels_of:
                    matched = set(re.findall(r"(\w+)\s*=", matchers)) - {"instance"}
                    assert matched <= labels_of[name], (panel["title"], name)
    assert {name.partition(":")[0] for name in queried} >= {"vllm", "mergestep"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    used = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(dashboard["panels"])))
    assert used == set(variables), "each variable is used and exists"
    placed = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [(p["x"] + i, p["y"] + j) for p in placed for i in range(p["w"]) for j in range(p["h"])]
    assert len(set(cells)) == len(cells) and max(cells)[0] < 24, "panels do not overlap"
    assert (dashboard["uid"] == "mergestep") == (board == "grafana.json")
