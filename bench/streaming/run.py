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
    never    if no guess of the next layer's experts is read ahead, and always: if each is

The file is read past the page cache (O_DIRECT), so that it does not count; the anonymous memory of
the process is shown. `--mixture` takes a mixture of experts, of which half fit, and compares the
experts that were in memory with what LRU and the best policy of all would have had there. With
`--checkpoint` it is that of a folder, continues a text, and is followed by one of the same form
with random weights; of both, guesses are shown that come true.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common.checkpoint_shapes import config_of
from bench.common.checkpoints import random_checkpoint, write_random
from bench.streaming.expert_guesses import (
    ALWAYS,
    NEVER,
    GuessTrace,
    guess_table,
    reading_guesses,
)
from bench.streaming.expert_memory import Access, Expert
from bench.streaming.expert_traces import heat_hits, lru_hits, oracle_hits
from bench.streaming.mapped_server import MappedServer
from bench.streaming.results import Measured, as_table, llama_table
from serve.engine.llm import LLM
from serve.loading.streaming import experts as streamed_experts
from serve.loading.streaming.speeds import disk_speed
from serve.loading.streaming.stream import WeightStream
from serve.machine import memory_parts, usable_processors
from serve.sampling_params import SamplingParams

_PROMPT, _KV_BYTES = 8, 256 << 20
_DISK_S = 1.0
_MIXTURE_LAYERS = 4
_TEXT = Path(__file__).parents[1] / "data" / "heldout.txt"
_TURNS = itertools.count()  # what is measured first changes, as experts that are used stay


@dataclass(slots=True)
class Answers:
    tokens: list[list[int]]
    seconds: float


def prompts(requests: int) -> list[list[int]]:
    return [[(7 * i + 31 * number) % 900 + 5 for i in range(_PROMPT)] for number in range(requests)]


def text_prompts(llm: LLM, requests: int) -> list[list[int]]:
    """Returns parts of a text, for a model that was trained."""
    ids = llm.tokenizer.encode(_TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    return [ids[64 * number : 64 * number + 32] for number in range(requests)]


def answer(
    llm: LLM, requests: int, tokens: int, *, is_drawn: bool, is_text: bool = False
) -> Answers:
    """is_drawn: tokens are drawn, as the most probable ones of random weights soon repeat.
    is_text: prompts are parts of a text."""
    params = [
        SamplingParams(max_tokens=tokens, temperature=float(is_drawn), seed=number, ignore_eos=True)
        for number in range(requests)
    ]
    asked = text_prompts(llm, requests) if is_text else prompts(requests)
    began = time.perf_counter()
    found = llm.generate(asked, params, use_tqdm=False)
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
    how = {"is_drawn": args.mixture, "is_text": args.checkpoint is not None}
    answer(llm, requests, 2, **how)
    traced = Traced.on(stream)
    disk = [disk_speed(file, stream.pieces, _DISK_S)]
    before = stream.stats()
    found = answer(llm, requests, tokens, **how)
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
    """The experts that were used, those that were guessed, and those that were there at first.
    slots: how many can be; num_experts: of a layer."""

    slots: int
    num_experts: int
    start: list[Expert]
    trace: list[Access]
    guesses: GuessTrace

    @staticmethod
    def on(stream: WeightStream) -> Traced:
        """Begins to note."""
        traced = Traced(0, 0, [], [], GuessTrace())
        for slots in stream.slots[:1]:
            traced.slots, traced.start = slots.num_slots, slots.content()
            traced.num_experts = slots.num_experts // slots.num_mixtures
            slots.on_use, slots.on_guess = traced.use, traced.guesses.guess
        return traced

    def use(self, mixture: int, experts: list[int]) -> None:
        self.trace.append((mixture, experts))
        self.guesses.use(mixture, experts)


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
    variants: list[tuple[str, Callable[[], AbstractContextManager[None]]]]
    variants = [("tokens_s", nullcontext), ("waiting_tokens_s", waiting_for_all)]
    if args.checkpoint:
        variants.append(("never_tokens_s", partial(reading_guesses, NEVER)))
        variants.append(("always_tokens_s", partial(reading_guesses, ALWAYS)))
    turn = next(_TURNS) % len(variants)
    found = {}
    for name, meanwhile in variants[turn:] + variants[:turn]:
        with meanwhile():
            found[name] = measure(llm, file, requests, args, memory)
    one, traced = found["tokens_s"]
    speeds = {name: each.tokens_s for name, (each, _) in found.items()}
    one = replace(one, is_equal=all(each.is_equal for each, _ in found.values()), **speeds)
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
    found = llama_child("bench.streaming.mapped_experts", args, job)
    for each in found.values():
        each["tokens_s"] = requests * args.tokens / each["seconds"]
    return found


def llama_child(module: str, args: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any]:
    """Returns what a module found in the Python that has llama.cpp."""
    threads = ["--threads", str(usable_processors())]
    return child([args.llama_python, module, str(args.gguf.resolve()), *threads], job)


def child(command: Sequence[str], job: dict[str, Any]) -> dict[str, Any]:
    """Returns what a module printed for a job. SystemExit with what it said if it failed. command:
    the Python, the module and its options."""
    done = subprocess.run(
        [command[0], "-m", *command[1:]],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    if done.returncode:
        raise SystemExit(f"{command[1]} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


_EXPERT_COUNTS = ("expert_hits", "expert_late", "expert_misses")


def packed_file(folder: Path) -> Path:
    (file,) = folder.glob("*.packed")
    return file


def mixture_checkpoint() -> Path:
    """Returns an OLMoE with few layers, which is written once."""
    config = config_of("olmoe-1b-7b") | {"num_hidden_layers": _MIXTURE_LAYERS}
    return random_checkpoint("olmoe-few-layers", config)


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
    if not args.checkpoint:
        model = mixture_checkpoint() if args.mixture else random_checkpoint(args.model)
        return run_model(args, model)
    found = run_model(args, args.checkpoint)
    with tempfile.TemporaryDirectory() as name:
        random = Path(name) / "random"
        random.mkdir()
        config = json.loads((args.checkpoint / "config.json").read_text(encoding="utf-8"))
        write_random(random, config, "of the same form", has_weights=True)
        # files have the figures of the trained one
        silent = argparse.Namespace(**vars(args) | {"json": None, "trace": None})
        return found + run_model(silent, random)


def run_model(args: argparse.Namespace, model: Path) -> list[Measured]:
    console = Console(width=150)
    counts = [int(each) for each in args.requests.split(",")]
    how = {"is_drawn": args.mixture, "is_text": args.checkpoint is not None}
    found: list[Measured] = []
    traces: dict[int, Traced] = {}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        packed = Path(name)
        whole = open_model(model, packed, 1 << 40)  # packs, all in memory
        total = stream_of(whole).num_bytes
        file = packed_file(packed)
        memory = {}
        for count in counts:
            answer(whole, count, 2, **how)
            memory[count] = answer(whole, count, args.tokens, **how)
        whole.shutdown()
        del whole
        share = args.share or (0.5 if args.mixture else 1 / 3)
        llm = open_model(model, packed, int(total * share))
        once = measure_mixture if args.mixture else measure
        for count in counts:
            rounds = [once(llm, file, count, args, memory[count]) for _ in range(args.rounds)]
            one, traces[count] = middle(rounds)
            found.append(one)
        stream = stream_of(llm)
        console.print(
            f"{model.name}: {total / 1e6:,.0f} MB of weights, {stream.num_bytes / 1e6:,.0f} MB in"
            f" memory; anonymous memory of the process {memory_parts()['anonymous'] / 1e6:,.0f} MB"
        )
        llm.shutdown()
    show(console, args, found, traces)
    return found


def middle(rounds: list[tuple[Measured, Traced]]) -> tuple[Measured, Traced]:
    """Returns the round with the median speed, with the medians of what it is compared with."""
    rounds.sort(key=lambda each: each[0].tokens_s)
    one, traced = rounds[len(rounds) // 2]
    medians = {}
    for name in ("waiting_tokens_s", "never_tokens_s", "always_tokens_s"):
        speeds = [getattr(each, name) for each, _ in rounds]
        medians[name] = None if None in speeds else statistics.median(speeds)
    return replace(one, **medians), traced


def show(
    console: Console,
    args: argparse.Namespace,
    found: Sequence[Measured],
    traces: Mapping[int, Traced],
) -> None:
    console.print(as_table(found))
    if args.checkpoint:
        notes = {count: traced.guesses.guesses for count, traced in traces.items()}
        console.print(guess_table(notes, next(iter(traces.values())).num_experts))
    if args.llama_python:
        console.print(llama_table(found))
    if args.llama_server:
        beside(console, args.llama_server, args.gguf, [each.requests for each in found])
    if args.trace:
        noted = {count: asdict(traced) for count, traced in traces.items()}
        args.trace.write_text(json.dumps(noted))
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-1b", help="a shape of bench.common")
    parser.add_argument("--mixture", action="store_true", help="a mixture, half of it in memory")
    parser.add_argument("--checkpoint", type=Path, help="the mixture's folder; sets --mixture")
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
    args = parser.parse_args()
    if (args.llama_python or args.llama_server) and not args.gguf:
        parser.error("--llama-python and --llama-server need --gguf")
    if args.llama_python and (args.checkpoint or not args.mixture):
        parser.error("--llama-python needs --mixture, without --checkpoint")
    args.mixture |= args.checkpoint is not None
    run(args)


if __name__ == "__main__":
    main()
