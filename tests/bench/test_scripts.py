"""Each measuring script runs in its smoke mode, in a process of its own."""

from __future__ import annotations

import json

import pytest

from ops.cpu import native_library
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.child import last_json, output_of

pytestmark = pytest.mark.exhaustive


def run_script(module, tmp_path, *options):
    environment = {"XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    return last_json(output_of("-m", module, "--smoke", *options, **environment))


def test_engine_overhead(tmp_path):
    result = run_script(
        "bench.engine.engine_overhead", tmp_path, "--model", str(checkpoint("llama"))
    )
    assert result["tokens"] == 256 * 20
    assert result["warm_rows_per_s"] > 1000
    assert result["paced_between_ms_p50"] > 0


def test_order_quick():
    """Every order on both memories; the one that is made for it is best at it. Where there is
    room for all, slack helps the short ones in every order."""
    for memory, results in last_json(output_of("-m", "bench.simulate.order", "--quick")).items():
        assert list(results) == ["fcfs", "priority", "mlfq", "fair", "srpt"]
        p99 = {order: result["short_ttft_p99_s"] for order, result in results.items()}
        most = 0.5 if memory == "tight" else 1.5
        assert max(p99["mlfq"], p99["priority"]) < most * p99["fcfs"], memory
        assert 0.7 < results["fair"]["fairness"] < 1.4 and results["fcfs"]["fairness"] > 6


def ops_readings(*command):
    return last_json(output_of("-m", *command, "--quick"))["readings"]


@pytest.mark.timing
def test_ops_quick():
    """Every kernel is measured against the ceiling that binds it."""
    readings = ops_readings("serve", "bench", "ops")
    names = {reading["name"] for reading in readings}
    assert {"int8 linear", "decode attention", "prefill attention", "RoPE + append"} <= names
    assert {
        "prefix attention",
        "merge parts",
        "int8 gated linear",
        "bf16 decode attention",
    } <= names
    assert {"RoPE of q", "greedy sampling", "top-p sampling", "int4 linear"} <= names
    assert {"sampler, greedy", "sampler, top-k, top-p", "sampler, logprobs"} <= names
    assert all(0 < r["share"] < 20 for r in readings if r["ceiling"] != "bf16")
    assert all(r["speedup"] > 0 for r in readings if r["name"] == "decode attention")


def test_memory_policy_quick():
    """With the real scheduler in simulated time, more requests run than with reserved maxima."""
    for results in last_json(output_of("-m", "bench.simulate.memory_policy", "--quick")).values():
        qps = {policy: result["qps"] for policy, result in results.items()}
        assert qps["predicted"] > 2 * qps["worst_case"] > 0
        assert 0.8 * qps["oracle"] < qps["predicted"] < 1.1 * qps["unlimited"]
        assert results["worst_case"]["preempted"] == 0
        assert results["predicted"]["coverage_p90"] > 0.7


def test_long_prompt_quick(tmp_path):
    """A prompt, streams and short requests run on the real engine, with an SLO and without."""
    file = tmp_path / "found.json"
    command = ("-m", "serve", "bench", "engine", "--long-prompt", "--quick", "--json", file)
    output_of(*command, XDG_CACHE_HOME=str(tmp_path))
    found = json.loads(file.read_text())
    for result in (found["static 128"], found["SLO 100 ms"]):
        gaps = result["gaps_s"]
        assert 0 < gaps["p50"] <= gaps["max"] < result["long_s"]
        assert (gaps["p99"] is None) == (gaps["n"] < 100)
        assert result["alone_s"]["p99"] is None and result["alone_s"]["n"] == 5
        assert result["alone_s"]["max"] > 0 and result["beside_long_s"]["max"] > 0
        assert 0 < result["error"] < 1
    assert len(found["SLO 100 ms"]["verdicts"]) == 6


def test_stalls_quick(tmp_path):
    """The default chunks and static ones serve the same load on a real engine."""
    file = tmp_path / "found.json"
    command = ("-m", "serve", "bench", "stalls", "--quick", "--json", file)
    output_of(*command, XDG_CACHE_HOME=str(tmp_path))
    found = json.loads(file.read_text())
    assert "all at once" in found
    for name in found.keys() - {"head"}:
        default, static = found[name]["default"], found[name]["256 rows"]
        assert default["requests"] == static["requests"] >= 8
        for figures in (default, static):
            gaps, ttft = figures["gap_ms"], figures["ttft_ms"]
            assert 0 < gaps["p50"] <= gaps["p99"]
            assert figures["ratio"] == pytest.approx(gaps["p99"] / gaps["p50"])
            assert 0 < ttft["p50"] <= ttft["max"] and ttft["n"] == figures["requests"]
            assert (ttft["p99"] is None) == (ttft["n"] < 100)
            assert figures["tokens_per_s"] > 0


@pytest.mark.timing  # shares are of readings beside it
@pytest.mark.parametrize("name", ["avx2", "portable"])
def test_ops_without_a_bf16_product(name):
    """A processor without the ceiling's instruction has no share, and no division by zero."""
    if name not in native_library.library().instruction_sets():
        pytest.skip(f"no {name} here")
    readings = ops_readings("bench.kernels.ops", "--isa", name)
    bf16 = [reading for reading in readings if reading["ceiling"] == "bf16"]
    assert bf16 and all(r["limit"] is r["share"] is None and r["rate"] > 0 for r in bf16)
    assert all(0 < r["share"] < 20 for r in readings if r["ceiling"] != "bf16")


def test_int4_quick():
    """The table has bytes read for few rows, operations for more, and speed-ups when asked."""
    command = ("-m", "bench.kernels.int4", "--quick", "--kinds", "minimums,fp4,q6_k")
    command = (*command, "--groups", "32")
    text = output_of(*command, "--rows", "1,16")
    assert text.count(" GB/s, ") == text.count(" GOP/s, ") == 3
    assert "minimums" in text and "reading memory" in text
    assert output_of(*command, "--rows", "1,16", "--times").count("x ") == 6


def test_connections():
    """Small numbers: that they are cheap is shown by the large ones."""
    result = last_json(
        output_of("-m", "bench.engine.connections", "--smoke", "idle", "storm", "readers")
    )
    assert result["idle_growth_mb"] < 60
    assert result["storm_connected_s"] < 1
    assert result["readers_beside_p99_ms"] > 0


def test_http_overhead(tmp_path):
    result = run_script("bench.engine.http_overhead", tmp_path, "--model", "random:tiny")
    assert result["ratio"] > 0


def test_io_quick(tmp_path):
    """Every kind of disk access has figures, and the folder is empty afterwards."""
    text = output_of("-m", "serve", "bench", "io", "--quick", "--dir", tmp_path)
    result = last_json(text)
    assert text.startswith(f"kernel {result['kernel']}, processors")
    assert {"threads"} < {cell["way"] for cell in result["cells"]}
    assert {cell["depth"] for cell in result["cells"]} == {1, 16}
    for cell in result["cells"]:
        assert cell["iops"] > 0 and 0 < cell["p50_us"] <= (cell["p99_us"] or cell["max_us"]), cell
    assert {row["what"] for row in result["store"]} == {"store", "load"}
    assert all(row["share"] > 0 for row in result["store"])
    assert list(tmp_path.iterdir()) == []


def printed(module: str, tmp_path) -> str:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "160"}
    return output_of("-m", module, "--quick", **environment)


@pytest.mark.skipif(not native_library.is_available(), reason="needs the compiled library")
def test_kv_memory_quick(tmp_path):
    text = printed("bench.kernels.kv_memory", tmp_path)
    for row in ("ahead, in the thread", "reserving 1 TiB", "pages of all layers, shuffled"):
        assert row in text
    unused = [line.split("│")[4] for line in text.splitlines() if "│ embedded" in line]
    assert all(float(share.strip().rstrip("%")) < 4 for share in unused) and unused
    mib = [float(line.split("│")[2]) for line in text.splitlines() if "all tokens in" in line]
    mib += [float(line.split("│")[2]) for line in text.splitlines() if "windows reach" in line]
    assert len(mib) == 2 and mib[1] < 0.5 * mib[0], "2,048 tokens, windows of 256"


@pytest.mark.skipif(not native_library.is_available(), reason="needs the compiled library")
def test_kv_formats_quick(tmp_path):
    """Formats of more bits change less, and the rotation helps keys."""
    lines = [x.split("│") for x in printed("bench.kernels.kv_formats", tmp_path).splitlines()]
    rows = [(x[1].strip(), float(x[4])) for x in lines if len(x) > 4 and x[4].strip()[0].isdigit()]
    keys = dict(rows[:12])
    assert keys["fp32"] == 0 < keys["int8, groups of 64"] < keys["int4"] / 20
    steps = keys["even steps per token, rotated"], keys["even steps per token"]
    assert steps[0] < steps[1] < 0.02
    own_block, last = keys["int4, own block of 128 int8"], keys["int4, last 128 int8"]
    assert last < own_block < keys["int4"] / 2


@pytest.mark.skipif(not native_library.is_available(), reason="needs the compiled library")
def test_long_decode_quick(tmp_path):
    lines = [x.split("│") for x in printed("bench.engine.long_decode", tmp_path).splitlines()]
    rows = [[cell.strip() for cell in x[1:-1]] for x in lines if len(x) > 6]
    assert [row[:4] for row in rows] == [
        ["int8", "144", "1", "2,048"],
        ["int4", "112", "1", "2,048"],
        ["int8", "144", "2", "1,500"],
        ["int4", "112", "2", "1,500"],
    ]
    assert all(float(row[5].replace(",", "")) > 0 for row in rows)


@pytest.mark.skipif(not native_library.is_available(), reason="needs the compiled library")
def test_states_quick(tmp_path):
    lines = [x.split("│") for x in printed("bench.engine.states", tmp_path).splitlines()]
    rows = [[cell.strip() for cell in x[1:-1]] for x in lines if len(x) > 5]
    decoded = [row for row in rows if len(row) == 5]
    prompts = [row for row in rows if len(row) == 4]
    assert [row[:2] for row in decoded] == [["1", "600"], ["2", "600"]] * 2
    assert [row[0] for row in prompts] == ["tiny-states", "dense"] * 2
    assert all(float(row[2]) > 0 for row in decoded)
    assert all(float(row[3]) > 0 for row in prompts)


def test_prefix_cache_quick(tmp_path):
    rows = [
        line for line in printed("bench.engine.prefix_cache", tmp_path).splitlines() if "│" in line
    ]
    assert [row.split("│")[1].strip() for row in rows] == [
        "computed",
        "in memory",
        "on disk, new process",
    ]
    cached = [int(row.split("│")[4]) for row in rows]
    assert cached[0] == 0 and min(cached[1:]) >= 256
    assert all("True" in row for row in rows)


def test_transport_quick():
    readings = last_json(output_of("-m", "bench.kernels.transport", "--quick"))
    for name in ("inproc", "shm", "tcp"):
        assert 0 < readings[f"{name} 64 B median"] <= readings[f"{name} 64 B p99"]
        assert all(readings[f"{name} {2**k} B one way"] > 0 for k in (16, 18, 20, 22))


def test_exchange_quick():
    times = last_json(output_of("-m", "bench.kernels.exchange", "--quick"))
    assert times["arena barrier"] > 0 and times["gloo barrier"] > 0
    for name in ("arena", "shm", "gloo"):
        assert all(times[f"{name} {rows} rows"] > 0 for rows in (1, 16, 512))


def test_memory_nodes_quick(tmp_path):
    """More sequences run at once over nodes, with the same tokens, and layers are timed."""
    command = ("-m", "bench.nodes.memory_nodes", "equality", "capacity")
    command += ("overlap", "layer", "--quick")
    found = last_json(output_of(*command, XDG_CACHE_HOME=str(tmp_path)))
    assert found["equality"]["int8: partition head"]["bits"] == 16
    assert found["capacity"]["is_same"] and found["capacity"]["times"] > 1
    assert all(ms > 0 for case in found["overlap"].values() for ms in case.values())
    assert set(found["layer"]) == {"inproc", "shm", "tcp"}
    assert all(0 < copies < path < layer for path, copies, _, layer in found["layer"].values())


def test_structured(tmp_path):
    result = run_script("bench.engine.structured", tmp_path)
    assert result["4096 compile a known one"] < result["4096 compile a new schema"]
    assert set(result) >= {"4096 mask person", "step free", "step masked"}
    # on a busy machine most tokens of so short a stream come together, without a gap
    assert all(gaps["p50"] <= gaps["max"] for gaps in result["gaps"].values())
    assert all(gaps["max"] > 0 for gaps in result["gaps"].values())


def test_groups(tmp_path):
    """Tensor ranks and stages beside one process, each engine in a process of its own."""
    result = run_script("bench.group", tmp_path)
    by_column = result["medians"]
    assert set(by_column["decode 16"]) == {"1 thread", "2 threads", "tensor 2", "stages 2"}
    assert all(rate > 0 for column in by_column.values() for rate in column.values())
    assert set(result["ratios"]["tensor 2 / 2 threads"]) < set(by_column)
    assert 0 < result["waits"]["tensor 2"]["decode 16"]["waits"] < 1
    assert result["waits"]["tensor 2"]["decode 16"]["results a step"] == pytest.approx(10, abs=1)


def test_fast_start(tmp_path):
    options = ("--parts", "link", "--rounds", "1")
    text = output_of("-m", "bench.cluster.fast_start", *options, XDG_CACHE_HOME=str(tmp_path))
    for row in ("link ", "copied ", "copied / link", "beside a stream", "a stream, alone"):
        assert row in text, row


def test_kv_pull(tmp_path):
    result = run_script("bench.engine.kv_pull", tmp_path)
    assert len(result["pulled_ms"]) == 2 and result["page_bytes"] > 0


def test_prefill_apart(tmp_path):
    result = run_script("bench.engine.prefill_apart", tmp_path)
    assert result["apart"]["count"] > 10 and result["merged, first token"]["count"] == 2


def test_prefill_overlap(tmp_path):
    result = run_script("bench.engine.prefill_overlap", tmp_path)
    assert result["pulled pages"] > 0 and len(result["exposed"]) == len(result["whole"]) == 1


def test_apart(tmp_path):
    """Merged, parted and automatic calls on two servers, each beside a prediction."""
    rows = run_script("bench.cluster.apart", tmp_path)
    assert [row["way"] for row in rows] == ["merged", "apart", "auto"]
    for row in rows:
        for kind in ("measured", "predicted"):
            assert 0 < row[kind]["ttft_p50"] <= row[kind]["ttft_p99"]


def test_kv_in_a_file(tmp_path):
    options = ("--shape", "small-32k", "--context", "2048", "--rounds", "1", "--shares", "0.75")
    options += ("--policies", "quest:budget=12%", "--folder", str(tmp_path))
    options += ("--kv-dtypes", "int8", "int4")
    text = output_of("-m", "bench.offload.run", *options, COLUMNS="160")
    for word in ("int8, all", "int4, all", "int8, 0.75", "int4, 0.75", "again", "fewer", "of disk"):
        assert word in text, word


def test_early_choices_of_kv_in_a_file():
    options = ("--shape", "small-32k", "--context", "2048", "--turns", "1", "--shares", "0.75")
    options += ("--policies", "quest:budget=12%", "--tokens", "2", "--settling", "2")
    text = output_of("-m", "bench.offload.guesses", *options, COLUMNS="160")
    models, names = ("random model", "trained model"), ("last token", "told", "faster")
    for word in (*models, *names, "coming", "in vain"):
        assert word in text, word


def test_kv_of_the_trained_model_in_a_file():
    options = ("--exercises", "1", "--tokens", "4", "--context", "1024")
    text = output_of("-m", "bench.offload.trained", *options, COLUMNS="160")
    for word in ("off", "quest:budget=6%", "in memory", "fetched KB a token"):
        assert word in text, word
