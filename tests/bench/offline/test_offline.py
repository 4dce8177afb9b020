"""Throughput, latency and start-up on tiny models, and the arithmetic of their figures."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
import torch

from bench.cli.latency import latency
from bench.cli.startup import _phases
from bench.cli.startup import startup as measure_startup
from bench.common.ceilings import Ceiling, steady
from bench.common.model_cost import ModelCost
from bench.common.tables import Head, check_file, interval, number, spread
from bench.offline import startup
from bench.offline.latency import Rounds
from bench.offline.peers import PeerError, PeerProcess, parse_peers
from bench.offline.requests import fixed_requests
from bench.offline.startup import Start
from bench.offline.tally import Tally
from bench.offline.tasks import Shape, make_task, warm_up_of
from bench.offline.throughput import throughput
from ops.cpu import native_library
from serve.config import EngineConfig
from serve.engine.step_trace import TracedStep
from serve.errors import ConfigError, GenerationError, MergestepError
from serve.loading.footprint import weight_bytes
from serve.loading.precision import Precision
from serve.models import read_spec
from serve.scheduler.step_time import StepWork
from tests.support.engine.checkpoints import checkpoint

PEER = """
import json, sys
mode_of_failure = sys.argv[1] if sys.argv[1] in ("hello", "mixed", "exit") else ""
options = dict(zip(sys.argv[-6::2], sys.argv[-5::2]))
assert set(options) == {"--sequences", "--tokens", "--threads"}, sys.argv
print("loading")
if mode_of_failure == "hello":
    sys.exit("no model here")
print(json.dumps({"peer": "slow 1.0", "modes": ["plain", "compiled"]}), flush=True)
tasks = 0
for line in sys.stdin:
    task = json.loads(line)
    tasks += 1
    prompts = task["prompts"]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts), "prompts are distinct"
    assert len(prompts) <= int(options["--sequences"])
    if task["kind"] == "mixed" and task["mode"] == "compiled":
        answer = {"skip": "not here"}
    elif task["kind"] == "mixed" and mode_of_failure == "mixed":
        answer = {"error": "out of memory"}
    elif task["kind"] == "decode" and mode_of_failure == "exit":
        sys.exit("killed")
    elif task["kind"] == "prefill":
        answer = {"seconds": [64.0] * len(prompts)}
    else:
        speed = 2.0 if task["mode"] == "compiled" else 1.0
        answer = {"seconds": [sum(task["answers"]) / speed]}
    print("noise")
    print(json.dumps(answer), flush=True)
"""
needs_kernels = pytest.mark.skipif(
    not native_library.is_available(), reason="ceilings need the kernels"
)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return "random:tiny"


def step_of(**work):
    return TracedStep(0.0, 1.0, StepWork(**work), 1, 0, 1)


def cost_of(weights, compute):
    spec, config = read_spec(checkpoint("llama")), EngineConfig()
    precision = Precision(compute, weights, "int8")
    return ModelCost(spec, precision, weight_bytes(config, spec, precision), kv_bytes=100)


def test_the_bound_of_a_step():
    """Reading binds few rows, products many; attention and the last product count."""
    spec = read_spec(checkpoint("llama"))
    cost = cost_of("int8", torch.float32)
    weights = cost.block_weights + cost.head_weights
    assert cost.head_weights == spec.vocab_size * spec.hidden_size
    one = cost.step(StepWork(1, 50, 1, samples=True))
    assert one.read_bytes == weights + 50 * 100
    assert one.products == 2 * weights
    widths = sum(layer.num_heads * layer.head_dim for layer in spec.attention_layers)
    assert one.attention == 4 * widths * 51
    many = cost.step(StepWork(0, 0, 64, 64 * 32, 1, samples=False))
    assert many.products == 2 * 64 * cost.block_weights and many.read_bytes == weights
    slow_memory = Ceiling(read=1.0, i8=1e30, bf16=1e30)
    assert one.bound_s(slow_memory) == pytest.approx(one.read_bytes)
    slow_units = Ceiling(read=1e30, i8=2.0, bf16=1e30)
    assert many.bound_s(slow_units) == pytest.approx(many.products / 2)
    both = [step_of(num_decodes=1, num_context=50, num_rows=1, samples=True)] * 2
    assert cost.bound_s(both, slow_memory) == pytest.approx(2 * one.read_bytes)


def test_the_bound_knows_the_precision():
    """bf16 weights are twice the bytes, and their products run on the bf16 units."""
    work = StepWork(1, 0, 1, samples=True)
    int8, plain = (
        cost_of("int8", torch.float32).step(work),
        cost_of("plain", torch.bfloat16).step(work),
    )
    assert plain.read_bytes == 2 * int8.read_bytes
    ceiling = Ceiling(read=1e30, i8=4.0, bf16=1.0)
    assert plain.bound_s(ceiling) > int8.bound_s(ceiling)
    assert cost_of("int4", torch.float32).step(work).read_bytes < int8.read_bytes
    without = ceiling._replace(bf16=0.0, read=1.0)
    assert plain.bound_s(without) == plain.read_bytes, "no such ceiling is no division by zero"


def test_measurements_between_unlike_ceilings_are_repeated():
    """The pair of readings that agrees counts, or else the closest pair, marked unreliable."""

    async def run():
        return next(rates)

    def probe():
        return Ceiling(next(reads), 1.0, 0.0)

    rates, reads = iter([5.0, 6.0]), iter([10.0, 20.0, 10.0, 11.0])
    found = asyncio.run(steady(run, probe))
    assert found.value == 6.0 and found.ceiling.read == 10.5
    rates, reads = iter([1.0, 2.0, 3.0, 4.0]), iter([1.0, 2.0, 2.0, 3.0, 1.0, 2.0, 1.0, 2.0])
    found = asyncio.run(steady(run, probe))
    assert found.value == 2.0 and found.drift == 0.5
    tally = Tally()
    for column, share in (("calm", 0.9), ("rising", 1.07)):
        tally.add("ours", column, "", 1.0, Ceiling(1.0, 1.0, 0.0), 0.01)
        tally.shares[column] = [share]
    assert tally.unreliable() == ["rising"]
    tally.add("peer", "calm", "compiled", 1.0, Ceiling(1.0, 1.0, 0.0), 0.5)
    assert tally.unreliable("peer") == ["calm"], "the rule is the same for a peer"


@pytest.fixture
def peer(tmp_path):
    """Returns the --peer option of a scripted peer; `failing` says where it fails."""
    script = tmp_path / "peer.py"
    script.write_text(PEER)

    def option(name, failing="none"):
        return f"{name}={sys.executable} {script} {failing}"

    return option


@needs_kernels
@pytest.mark.exhaustive
def test_latency_beside_a_peer(tiny, tmp_path, capsys, peer):
    """A peer's modes are all measured, as often as ours, and the better one counts."""
    file = tmp_path / "latency.json"
    result = latency(
        tiny, batches=[1, 4, 64], prefills=[64], rounds=2, peers=[peer("slow")], json_file=file
    )
    rates = result["tokens_per_s"]
    columns = {"prefill_64", "decode_1", "decode_4", "decode_64", "mixed_16"}
    assert set(rates["ours"]) == columns
    assert rates["slow"] == {
        "prefill_64": 1.0,
        "decode_1": 2.0,
        "decode_4": 2.0,
        "decode_64": 2.0,
        "mixed_16": 1.0,
    }
    assert result["modes"]["slow"] == {
        "prefill_64": "plain",
        "decode_1": "compiled",
        "decode_4": "compiled",
        "decode_64": "compiled",
        "mixed_16": "plain",
    }
    repeats = {
        (name, column, mode): len(values)
        for name, by_column in result["rounds"].items()
        for column, by_mode in by_column.items()
        for mode, values in by_mode.items()
    }
    assert set(repeats.values()) == {2}, "every engine and mode has one repeat in each round"
    assert len(repeats) == 5 + 4 * 2 + 1
    assert result["ceilings"].keys() == {"ours", "slow"} and result["errors"] == {}
    for column, ms in result["ms"].items():
        samples = {"mixed": 2, "prefill": 6}.get(column.partition("_")[0], 64)
        assert ms["n"] == samples and 0 < ms["p50"] <= ms["max"], column
        assert ms["p99"] is None, "64 steps make no p99"
        if column.startswith("decode"):  # the rate is that of its steps
            batch = int(column.partition("_")[2])
            assert rates["ours"][column] == pytest.approx(1e3 * batch / ms["p50"], rel=3)
    above = {column for column, share in result["share_of_bound"].items() if share > 1}
    assert above <= set(result["unreliable"])
    assert all(share > 0 for share in result["share_of_bound"].values())
    text = capsys.readouterr().out
    assert "over the best" in text and "beside slow" in text and "slow: slow 1.0" in text
    assert "compiled" in text and "(n 6)" in text.replace("\n", " ")
    assert json.loads(file.read_text())["tokens_per_s"] == rates


@needs_kernels
@pytest.mark.exhaustive
def test_what_a_failing_peer_has_measured_is_kept(tiny, capsys, peer):
    peers = [peer("absent", "hello"), peer("partial", "mixed"), peer("dying", "exit")]
    peers.append("missing=/nowhere/program")
    result = latency(tiny, batches=[2], prefills=[8], rounds=2, peers=peers)
    rates, errors = result["tokens_per_s"], result["errors"]
    assert set(rates["ours"]) == {"prefill_8", "decode_2", "mixed_16"}
    assert all(len(values[""]) == 2 for values in result["rounds"]["ours"].values())
    assert set(rates["partial"]) == {"prefill_8", "decode_2"}
    assert set(rates["dying"]) == {"prefill_8"}, "measured before its end"
    assert "absent" not in rates and "missing" not in rates
    assert errors["partial"] == {"plain, mixed 16": "out of memory"}
    assert "killed" in errors["dying"][""] and "decode 2" in errors["dying"][""]
    assert "no model here" in errors["absent"][""]
    assert "cannot be started" in errors["missing"][""]
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("failed") >= 6
    assert "partial failed at plain, mixed 16: out of memory" in text


@needs_kernels
def test_an_error_of_our_engine_keeps_the_rounds_before_it(tiny, tmp_path, monkeypatch):
    run = Rounds.run

    async def second_fails(self, number):
        if number == 1:
            raise GenerationError("the device is gone")
        await run(self, number)

    monkeypatch.setattr(Rounds, "run", second_fails)
    file = tmp_path / "latency.json"
    with pytest.raises(GenerationError):
        latency(tiny, batches=[2], prefills=[8], rounds=3, quick=True, json_file=file)
    kept = json.loads(file.read_text())
    assert {len(modes[""]) for modes in kept["rounds"]["ours"].values()} == {1}
    assert kept["tokens_per_s"]["ours"]["decode_2"] > 0 and kept["start_s"] > 0


@pytest.mark.exhaustive
def test_a_peer_that_hangs_is_given_up(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text("import time; print('not JSON', flush=True); time.sleep(60)")
    shape = Shape((1,), 8, 2, (8,), has_mixed=False)
    process = PeerProcess(f"{sys.executable} {script}", shape, 1, limit_s=0.5)
    with pytest.raises(PeerError, match="no answer within"), process:
        pass


def test_tasks_are_the_same_for_all_and_distinct_within():
    shape = Shape((4,), 32, 8, (16,), has_mixed=True)
    for column in shape.columns:
        task = make_task(column, shape, 5000, (0, 0))
        assert task == make_task(column, shape, 5000, (0, 0))
        assert task != make_task(column, shape, 5000, (0, 1))
        assert len({tuple(prompt) for prompt in task.prompts}) == len(task.prompts)
        assert len(task.prompts) <= shape.most_sequences
        longest = max(len(p) + n for p, n in zip(task.prompts, task.answers, strict=True))
        assert longest <= shape.most_tokens
        short = warm_up_of(task)
        assert sum(short.answers) <= 2 * len(task.prompts)
    mixed = [make_task("mixed_16", shape, 5000, (i,)) for i in range(2)]
    assert [len(p) for p in mixed[0].prompts] == [len(p) for p in mixed[1].prompts]


@pytest.mark.exhaustive
@needs_kernels
def test_throughput_counts_what_was_answered(tiny, tmp_path, capsys):
    file = tmp_path / "throughput.json"
    result = throughput(
        tiny, requests=6, input_len=20, output_len=5, repeats=2, max_num_seqs=3, json_file=file
    )
    assert (result["requests"], result["prompt_tokens"], result["output_tokens"]) == (6, 120, 30)
    for seconds, rate in zip(result["seconds"], result["output tokens/s"], strict=True):
        assert rate == pytest.approx(30 / seconds)
    assert len(result["share_of_bound"]) == 2 and all(s > 0 for s in result["share_of_bound"])
    assert max(result["sequences at once"]) <= 3
    for steps, rows in zip(result["steps"], result["rows a step"], strict=True):
        assert steps * rows == pytest.approx(120 + 6 * 4), "every row but the last tokens'"
    assert "6 requests at once" in capsys.readouterr().out
    assert json.loads(file.read_text())["head"]["what"] == "throughput, random-tiny"


@pytest.mark.exhaustive
@needs_kernels
def test_throughput_beside_transformers(tiny):
    result = throughput(tiny, requests=3, output_len=4, repeats=1, peer="transformers")
    assert set(result["peer_seconds"]) == {"one padded batch", "one by one"}
    best = min(seconds[0] for seconds in result["peer_seconds"].values())
    assert result["over_peer"] == pytest.approx(best / result["seconds"][0])


@pytest.mark.process
def test_startup_in_order(capsys):
    result = measure_startup(str(checkpoint("llama")), quick=True)
    (start,) = result["starts"]["warm"]
    marks = start["at_s"]
    assert list(marks) == ["listening", "/health", "/ready", "first token"]
    assert marks["/health"] <= marks["/ready"] <= marks["first token"]
    assert start["rss_bytes"] > 50 << 20
    assert result["import_seconds"]["torch"] > 0.05 and result["was_cold"] is False
    assert "to ready" in capsys.readouterr().out


@pytest.mark.process
def test_a_server_that_does_not_start_says_why():
    with pytest.raises(MergestepError, match=r"(?s)/ready.*kv_cache_bytes"):
        startup.start_once(str(checkpoint("llama")), ["--kv-cache-bytes", "1"], limit_s=30)


def test_files_are_dropped_from_memory(tmp_path):
    """The files leave the page cache, or the function returns that they cannot."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    assert startup._is_in_memory(file), "just written"
    if not startup.drop_from_memory(tmp_path):  # it has looked; to look again may read it back
        pytest.skip("this file system keeps files in memory")
    file.read_bytes()
    assert startup._is_in_memory(file)


def test_fixed_requests():
    """Lengths are exact, random for a model without a mixture, or those of the embedded model."""
    path = str(checkpoint("llama"))
    exact = fixed_requests(path, count=3, input_len=7, output_len=2)
    assert [(len(w.token_ids), w.max_tokens, w.ignore_eos) for w in exact] == [(7, 2, True)] * 3
    mixed = fixed_requests(path, count=20, output_len=30)
    assert len({len(w.token_ids) for w in mixed}) > 5 and max(w.max_tokens for w in mixed) <= 30
    assert mixed == fixed_requests(path, count=20, output_len=30)
    assert all(w.messages for w in fixed_requests(None, count=4))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: throughput(repeats=-1), "repeats"),
        (lambda: throughput(peer="vllm"), "peer"),
        (lambda: throughput(requests=-2), "requests"),
        (lambda: throughput("random:huge"), "random:huge"),
        (lambda: latency(batches=[0]), "batches"),
        (lambda: latency(context=2000), "context"),
        (lambda: latency(peers=["vllm"]), "peer"),
        (lambda: latency(peers=["ours=true"]), "ours"),
        (lambda: latency(peers=["a=true", "a=false"]), "taken"),
        (lambda: measure_startup(repeats=-1), "repeats"),
        (lambda: parse_peers(["=true"]), "NAME=COMMAND"),
    ],
)
def test_what_cannot_be_measured_is_refused_before(call, named):
    with pytest.raises(ConfigError, match=named):
        call()


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    with pytest.raises((ConfigError, OSError)):
        check_file(tmp_path / "nowhere" / "result.json")


def test_numbers_and_heads():
    assert [number(x) for x in (12345.6, 12.34, 1.234, 0.01234)] == [
        "12,346",
        "12.3",
        "1.23",
        "0.012",
    ]
    assert spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)" and spread([200.0]) == "200"
    assert interval([5, 1, 2, 3, 4]) == (1, 5), "1 - 2/32 = 94 %"
    assert interval(list(range(8))) == (1, 6), "1 - 2 * (1 + 8) / 256 = 93 %"
    assert interval(list(range(20))) == (5, 14), "96 %; one more at either end: 88 %"
    head = Head.now("test")
    assert "torch" in str(head) and head.processors >= 1


def test_phases_are_those_that_all_starts_log():
    """Slow starts log lines of progress, too, and lines have numbers in them."""
    begun, loaded, late = "serve: loading", "serve: loaded in 1.5 s", "serve: 2 requests"
    starts = [
        Start({"/ready": 4.0}, 0, [(1.0, begun), (3.0, loaded), (9.0, late)]),
        Start(
            {"/ready": 5.0}, 0, [(1.5, begun), (2.0, "serve: 40 %"), (4.5, "serve: loaded in 3 s")]
        ),
        Start({"/ready": 6.0}, 0, [(2.0, begun), (5.0, "serve: loaded in 3 s")]),
    ]
    expected = ['1.50 to "loading"', '3.00 to "loaded in 1.5 s"', "1.00 to ready"]
    assert _phases(starts) == expected
    assert _phases([Start({"/ready": 2.0})]) == ["2.00 to ready"]
