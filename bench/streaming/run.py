"""Models beyond their memory: python -m bench.streaming.run.

A model with random weights is served twice: with all weights in memory, and with a third of that
(`--share`) for all weights, buffers included. Measured for each number of requests at once are

    equal    whether all answers are those of the model in memory
    tok/s    tokens a second of decoding, in memory and with the share
    read     bytes a second that the steps read from the disk
    disk     what the disk gives to direct reads of the same bytes, just before and just after
    share    of the disk that the steps use
    hits     of experts in memory when they were used, read ahead or not; heat, LRU, oracle: what
             the server's policy and two others would have without reading ahead
    waiting  tokens a second if a layer's experts are all waited for before the first is computed

The file is read past the page cache (O_DIRECT), so that it does not count; the anonymous memory of
the process is shown. `--mixture` takes a mixture of experts, of which half fit, and compares the
experts that were in memory with what LRU and the best policy of all would have had there.
With `--rounds`, all take turns, and the round with the median tokens per second is shown.
`--llama-server` and `--gguf` measure passes of llama.cpp over the same weights, which are dropped
from memory before each pass (mapped_server.py): with less memory than weights, it reads most so.
`--llama-python` and `--gguf` measure it over a mixture, with memory for as many experts as the
server has, in the same rounds (mapped_experts.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common.checkpoint_shapes import config_of
from bench.common.checkpoints import cache_folder, random_checkpoint, write_random
from bench.common.safetensors_writer import INDEX, SINGLE
from bench.streaming.expert_memory import Access, Expert
from bench.streaming.expert_traces import heat_hits, lru_hits, oracle_hits
from bench.streaming.mapped_server import MappedServer
from serve.engine.llm import LLM
from serve.loading.streaming import experts as streamed_experts
from serve.loading.streaming.speeds import disk_speed
from serve.loading.streaming.stream import WeightStream
from serve.machine import usable_processors
from serve.sampling_params import SamplingParams

_PROMPT, _KV_BYTES = 8, 256 << 20
_DISK_S = 1.0
_MIXTURE_LAYERS = 4
_TURNS = itertools.count()  # what is measured first changes, as experts that are used stay


@dataclass(slots=True)
class Measured:
    """One number of requests. Bytes and seconds; hit rates are None for models without experts."""

    requests: int
    is_equal: bool
    memory_tokens_s: float
    tokens_s: float
    step_s: float
    read_s: float
    disk_s: float
    stalled: float
    hits: float | None = None
    heat: float | None = None
    lru: float | None = None
    oracle: float | None = None
    waiting_tokens_s: float | None = None
    llama: dict[str, dict[str, float]] | None = None  # as mapped_experts.py prints it

    @property
    def share(self) -> float:
        return self.read_s / self.disk_s


@dataclass(slots=True)
class Answers:
    tokens: list[list[int]]
    seconds: float


def prompts(requests: int) -> list[list[int]]:
    return [[(7 * i + 31 * number) % 900 + 5 for i in range(_PROMPT)] for number in range(requests)]


def answer(llm: LLM, requests: int, tokens: int, *, is_drawn: bool) -> Answers:
    """is_drawn: tokens are drawn, as the most probable ones of random weights soon repeat."""
    params = [
        SamplingParams(max_tokens=tokens, temperature=float(is_drawn), seed=number, ignore_eos=True)
        for number in range(requests)
    ]
    began = time.perf_counter()
    found = llm.generate(prompts(requests), params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return Answers([list(each.outputs[0].token_ids) for each in found], seconds)


def open_model(model: Path, packed: Path, memory_bytes: int | None) -> LLM:
    return LLM(
        str(model),
        dtype="int8",
        packed_cache=str(packed),
        kv_cache_bytes=_KV_BYTES,
        max_model_len=512,
        speculation="off",
        prefix_cache=False,
        weight_memory_bytes=memory_bytes,
    )


def stream_of(llm: LLM) -> WeightStream:
    stream = llm._loaded.weight_stream
    assert stream is not None, "weight_memory_bytes is set"
    return stream


def measure(
    llm: LLM, file: Path, requests: int, args: argparse.Namespace, memory: Answers
) -> tuple[Measured, Traced]:
    """Measures one number of requests, with the disk's bandwidth before and after."""
    stream, tokens = stream_of(llm), args.tokens
    answer(llm, requests, 2, is_drawn=args.mixture)
    traced = Traced.on(stream)
    disk = [disk_speed(file, stream.pieces, _DISK_S)]
    before = stream.stats()
    found = answer(llm, requests, tokens, is_drawn=args.mixture)
    after = stream.stats()
    disk.append(disk_speed(file, stream.pieces, _DISK_S))
    uses = [getattr(after, name) - getattr(before, name) for name in _EXPERT_COUNTS]
    one = Measured(
        requests,
        found.tokens == memory.tokens,
        requests * tokens / memory.seconds,
        requests * tokens / found.seconds,
        found.seconds / tokens,
        (after.read_bytes - before.read_bytes) / found.seconds,
        sum(disk) / 2,
        (after.stalled_s - before.stalled_s) / found.seconds,
        uses[0] / sum(uses) if sum(uses) else None,
    )
    return one, traced


@dataclass(slots=True)
class Traced:
    """The experts that were used, and those that were there at first. slots: how many can be."""

    slots: int
    start: list[Expert]
    trace: list[Access]

    @staticmethod
    def on(stream: WeightStream) -> Traced:
        """Begins to note."""
        traced = Traced(0, [], [])
        for slots in stream.slots[:1]:
            traced.slots, traced.start = slots.num_slots, slots.content()
            slots.on_use = lambda mixture, experts: traced.trace.append((mixture, experts))
        return traced


@contextmanager
def waiting_for_all() -> Iterator[None]:
    """Meanwhile no expert is computed before all of its layer are there."""
    before, streamed_experts.MAX_SUM_BYTES = streamed_experts.MAX_SUM_BYTES, -1
    try:
        yield
    finally:
        streamed_experts.MAX_SUM_BYTES = before


def measure_mixture(
    llm: LLM, file: Path, requests: int, args: argparse.Namespace, memory: Answers
) -> tuple[Measured, Traced]:
    """Measures one number of requests as `measure`, and what it is compared with."""
    is_first = next(_TURNS) % 2 == 0
    if is_first:
        one, traced = measure(llm, file, requests, args, memory)
    with waiting_for_all():
        other, _ = measure(llm, file, requests, args, memory)
    if not is_first:
        one, traced = measure(llm, file, requests, args, memory)
    one.waiting_tokens_s = other.tokens_s
    one.is_equal &= other.is_equal
    one.heat = heat_hits(traced.trace, traced.slots, traced.start)
    one.lru = lru_hits(traced.trace, traced.slots, traced.start)
    one.oracle = oracle_hits(traced.trace, traced.slots, traced.start)
    if args.llama_python:
        one.llama = mapped(args, requests, memory, traced)
    return one, traced


def mapped(
    args: argparse.Namespace, requests: int, memory: Answers, traced: Traced
) -> dict[str, dict[str, float]]:
    """Measures llama.cpp with the same tokens and memory for as many experts."""
    pairs = zip(prompts(requests), memory.tokens, strict=True)
    job = {
        "sequences": [prompt + tokens for prompt, tokens in pairs],
        "prompt": _PROMPT,
        "experts": traced.slots,
        "start": traced.start,
    }
    command = [args.llama_python, "-m", "bench.streaming.mapped_experts", str(args.gguf)]
    command += ["--threads", str(usable_processors())]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, input=json.dumps(job), capture_output=True, text=True, check=True, cwd=root
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    for each in found.values():
        each["tokens_s"] = requests * args.tokens / each["seconds"]
    return found


_EXPERT_COUNTS = ("expert_hits", "expert_late", "expert_misses")


def packed_file(folder: Path) -> Path:
    (file,) = folder.glob("*.packed")
    return file


def mixture_checkpoint() -> Path:
    """Returns an OLMoE with few layers, which is written once."""
    config = config_of("olmoe-1b-7b") | {"num_hidden_layers": _MIXTURE_LAYERS}
    return written("random-olmoe-few-layers", config)


def written(name: str, config: dict[str, Any]) -> Path:
    """Returns a checkpoint with random weights of this configuration, which is written once."""
    path = cache_folder() / name
    if not any((path / file).exists() for file in (SINGLE, INDEX)):
        path.mkdir(parents=True, exist_ok=True)
        write_random(path, config, name.removeprefix("random-"), has_weights=True)
    return path


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def beside(console: Console, program: str, gguf: Path, counts: Sequence[int]) -> None:
    """Measures passes of llama.cpp over weights that are on the disk."""
    size = gguf.stat().st_size
    table = Table("llama.cpp, requests", "cold pass s", "read MB/s", "tok/s", "disk MB/s")
    for count in counts:
        server = MappedServer(program, gguf, usable_processors(), count)
        try:
            passes = sorted(server.cold_pass_s(count) for _ in range(3))
        finally:
            server.close()
        disk, middle = disk_speed(gguf, (), _DISK_S), passes[1]
        cells = f"{count} {middle:.2f} {size / middle / 1e6:,.0f} {count / middle:.2f}".split()
        table.add_row(*cells, f"{disk / 1e6:,.0f}")
    console.print(f"llama.cpp maps {size / 1e6:,.0f} MB")
    console.print(table)


def run(args: argparse.Namespace) -> list[Measured]:
    console = Console(width=120)
    model = mixture_checkpoint() if args.mixture else random_checkpoint(args.model)
    counts = [int(each) for each in args.requests.split(",")]
    found: list[Measured] = []
    traces: dict[int, object] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        packed = Path(name)
        whole = open_model(model, packed, 1 << 40)  # packs, all in memory
        total = stream_of(whole).num_bytes
        file = packed_file(packed)
        memory = {}
        for count in counts:
            answer(whole, count, 2, is_drawn=args.mixture)
            memory[count] = answer(whole, count, args.tokens, is_drawn=args.mixture)
        whole.shutdown()
        del whole
        share = args.share or (0.5 if args.mixture else 1 / 3)
        llm = open_model(model, packed, int(total * share))
        once = measure_mixture if args.mixture else measure
        for count in counts:
            rounds = [once(llm, file, count, args, memory[count]) for _ in range(args.rounds)]
            rounds.sort(key=lambda each: each[0].tokens_s)
            one, traced = rounds[len(rounds) // 2]
            waits = [each.waiting_tokens_s for each, _ in rounds if each.waiting_tokens_s]
            one.waiting_tokens_s = statistics.median(waits) if waits else None
            found.append(one)
            traces[count] = asdict(traced)
        stream = stream_of(llm)
        console.print(
            f"{model.name}: {total / 1e6:,.0f} MB of weights, {stream.num_bytes / 1e6:,.0f} MB in"
            f" memory; anonymous memory of the process {anonymous_bytes() / 1e6:,.0f} MB"
        )
        llm.shutdown()
    console.print(as_table(found))
    if args.llama_python:
        console.print(llama_table(found))
    if args.llama_server:
        beside(console, args.llama_server, args.gguf, counts)
    if args.trace:
        args.trace.write_text(json.dumps(traces))
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    return found


def as_table(found: Sequence[Measured]) -> Table:
    names = ["requests", "equal", "tok/s in memory", "tok/s", "step ms", "read MB/s", "disk MB/s"]
    names += ["share", "stalled"]
    if found and found[0].hits is not None:
        names += ["hits", "heat", "LRU", "oracle", "waiting"]
    table = Table(*names)
    for one in found:
        cells = [
            str(one.requests),
            "yes" if one.is_equal else "NO",
            f"{one.memory_tokens_s:.1f}",
            f"{one.tokens_s:.1f}",
            f"{one.step_s * 1e3:.0f}",
            f"{one.read_s / 1e6:,.0f}",
            f"{one.disk_s / 1e6:,.0f}",
            f"{one.share:.0%}",
            f"{one.stalled:.0%}",
        ]
        rates = (one.hits, one.heat, one.lru, one.oracle)
        cells += [f"{each:.1%}" for each in rates if each is not None]
        if one.waiting_tokens_s is not None:
            cells.append(f"{one.waiting_tokens_s:.1f}")
        table.add_row(*cells)
    return table


def llama_table(found: Sequence[Measured]) -> Table:
    table = Table("llama.cpp, requests", "memory", "tok/s", "hits", "read MB/s", "dropping s")
    for one in found:
        for name, each in (one.llama or {}).items():
            cells = [str(one.requests), name, f"{each['tokens_s']:.2f}"]
            if "hits" in each:
                cells += [f"{each['hits']:.1%}", f"{each['read'] / each['seconds'] / 1e6:,.0f}"]
                cells.append(f"{each['dropping']:.1f}")
            table.add_row(*cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-1b", help="a shape of bench.common")
    parser.add_argument("--mixture", action="store_true", help="a mixture, half of it in memory")
    parser.add_argument("--share", type=float, help="of the weights that are in memory")
    parser.add_argument("--requests", default="1,8,32", help="at once, comma-separated")
    parser.add_argument("--tokens", type=int, default=12, help="of each answer")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--llama-server", help="the program of llama.cpp")
    parser.add_argument("--llama-python", help="a Python with llama-cpp-python and gguf")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--gguf", type=Path, help="the same weights for llama.cpp")
    parser.add_argument("--trace", type=Path, help="where the experts that were used are written")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
