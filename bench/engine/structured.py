"""Measures the cost of structured output.

It measures the compilation of a grammar (new and cached), the mask of one token, and decode steps
of 16 masked rows and of 16 free rows, which alternate in one run. It then measures the time between
two tokens of a stream, alone and beside a request of 128 sequences whose grammar is simple or made
to be slow.

Run: python -m bench.engine.structured [--smoke]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence

from serve import LLM, SamplingParams
from serve.config import default_model_path
from serve.engine.engine import Engine
from serve.errors import RequestError
from serve.structured.compiler import GrammarCompiler
from serve.structured.token_mask import Matcher, SequenceMask
from serve.structured_output import StructuredOutput
from serve.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
WIDE = {
    "type": "object",
    "properties": {f"field_{i}": {"type": ["string", "null"]} for i in range(100)},
}
LONG_TEXT = {"type": "string", "minLength": 5000}
ROWS = 16
HOSTILE_N = 128  # sequences of the request that runs beside a stream
HOSTILE_PROMPT = [5, 6, 7, 8]


def with_tokens(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """Extends the tokenizer's vocabulary to `size` with pairs of its tokens, and returns it."""
    assert tokenizer.pieces is not None
    own = list(tokenizer.pieces)
    existing = set(own)
    pairs = (a + b for a, b in itertools.product(own[-600:], own[300:900]))
    more = (piece for piece in pairs if piece not in existing)
    tokenizer.pieces = own + list(itertools.islice(more, size - len(own)))
    return tokenizer


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def compile_times(compiler: GrammarCompiler) -> dict[str, float]:
    """Returns the milliseconds of a compilation by case."""
    schemas = [StructuredOutput("json_schema", json.dumps(each)) for each in (PERSON, WIDE)]
    times = {"first of all (starts the child)": seconds(lambda: compiler.compile(schemas[0]))}
    for i in range(9):
        fresh = StructuredOutput("json_schema", json.dumps({**PERSON, "title": str(i)}))
        times[f"new {i}"] = seconds(lambda each=fresh: compiler.compile(each))  # type: ignore[misc]
    new = statistics.median([t for name, t in times.items() if name.startswith("new")])
    cached = [seconds(lambda: compiler.compile(schemas[0])) for _ in range(99)]
    return {
        "first of all (starts the child)": times["first of all (starts the child)"] * 1e3,
        "a new schema": new * 1e3,
        "a new one of 100 fields": seconds(lambda: compiler.compile(schemas[1])) * 1e3,
        "a known one": statistics.median(cached) * 1e3,
    }


def mask_times(
    compiler: GrammarCompiler, vocab_size: int, schema: object, count: int
) -> list[float]:
    """Returns the microseconds of each of at least `count` tokens: accepting the previous token,
    computing the mask, and checking whether the answer ends."""
    structured = StructuredOutput("json_schema", json.dumps(schema))
    times: list[float] = []
    seed = 0
    while len(times) < count:
        mask = SequenceMask(vocab_size, num_prompt=0, matcher=Matcher(compiler.compile(structured)))
        tokens: list[int] = []
        for _ in range(60):
            times.append(seconds(lambda: mask.fill(tokens)) * 1e6)  # noqa: B023  # called at once
            allowed = [i for i in range(vocab_size) if mask.bits[i >> 5] >> (i & 31) & 1]
            seed += 1
            tokens.append(allowed[seed * 7919 % len(allowed)])
            began = time.perf_counter()
            is_over = mask.ending(tokens)
            times[-1] += (time.perf_counter() - began) * 1e6
            if is_over:
                break
    return times


def step_times(rounds: int, num_tokens: int) -> dict[str, float]:
    """Returns the milliseconds of a step of ROWS rows by case, as medians over the rounds. The
    cases alternate."""
    masked = StructuredOutput("json_schema", json.dumps(LONG_TEXT))
    settings = {"max_tokens": num_tokens, "ignore_eos": True, "seed": 1}
    cases = {
        "free": SamplingParams(**settings),  # type: ignore[arg-type]
        "masked": SamplingParams(**settings, structured=masked),  # type: ignore[arg-type]
        "one of them masked": None,
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    prompts = [[5 + i] * 8 for i in range(ROWS)]
    with LLM(
        str(default_model_path()), max_num_seqs=ROWS, prefix_cache=False, speculation="off"
    ) as llm:
        for number in range(rounds + 1):
            for name, params in cases.items():
                each = [params or cases["masked" if i == 0 else "free"] for i in range(ROWS)]
                took = seconds(lambda: llm.generate(prompts, each, use_tqdm=False))  # type: ignore[arg-type]  # noqa: B023
                if number:  # the first round compiles
                    times[name].append(took / num_tokens * 1e3)
    return {name: statistics.median(samples) for name, samples in times.items()}


def grammars() -> dict[str, StructuredOutput | None]:
    """Returns grammars by name: none, a simple one, and three with very many branches."""
    numbers = range(400)
    rules = (f"t{i}: /[a-z]{{1,{i % 40 + 1}}}/ t{i * 7 % 400}?" for i in numbers)
    lark = "start: " + " | ".join(f"t{i}" for i in numbers) + "\n" + "\n".join(rules)
    each: dict[str, object] = {
        f"a{i}": {"type": "array", "items": {"$ref": "#/$defs/a"}} for i in range(64)
    }
    branches = [{"$ref": f"#/$defs/a{i}"} for i in range(64)]
    nested = {"$defs": {"a": {"anyOf": branches}, **each}, "$ref": "#/$defs/a"}
    unclear = "start: a+\na: b c | c b | b b | /[a-z]/\nb: a a | /[a-z ]/ | a b a\n"
    unclear += "c: b a | /[a-z]+/ | c c"
    return {
        "no grammar": None,
        "any object": StructuredOutput("json_object", ""),
        "64 arrays of each other": StructuredOutput("json_schema", json.dumps(nested)),
        "400 rules": StructuredOutput("grammar", lark),
        "rules of each other": StructuredOutput("grammar", unclear),
    }


async def _run_beside(engine: Engine, structured: StructuredOutput | None, num_tokens: int) -> None:
    params = SamplingParams(
        n=HOSTILE_N,
        max_tokens=num_tokens,
        seed=1,
        structured=structured,
        ignore_eos=structured is None,
    )
    # the engine refuses a grammar that is too complex
    with contextlib.suppress(RequestError):
        await engine.generate(HOSTILE_PROMPT, params)


async def _gaps(engine: Engine, num_tokens: int) -> list[float]:
    """Returns the seconds between the tokens of one stream, of which some may come together."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    arrivals: list[float] = []
    async for delta in engine.stream(HOSTILE_PROMPT, params):
        arrivals += [time.perf_counter()] * len(delta.token_ids)
    return [later - earlier for earlier, later in itertools.pairwise(arrivals)]


async def _measure(rounds: int, num_tokens: int) -> dict[str, dict[str, float]]:
    """Returns percentiles of the milliseconds over all rounds by case. The cases alternate."""
    cases = grammars()
    samples: dict[str, list[float]] = {name: [] for name in ("alone", *cases)}
    path, seqs = str(default_model_path()), HOSTILE_N + 2
    async with Engine(path, max_num_seqs=seqs, speculation="off") as engine:  # a token a step
        for number in range(rounds + 1):
            gaps = {"alone": await _gaps(engine, num_tokens)}
            for name, structured in cases.items():
                other = asyncio.create_task(_run_beside(engine, structured, num_tokens // 2))
                await asyncio.sleep(0.02)
                gaps[name] = await _gaps(engine, num_tokens)
                await other
            for name, seconds in gaps.items():
                samples[name] += seconds if number else []  # the first round compiles
    return {
        name: {
            "p50": round(1e3 * sorted(gaps)[len(gaps) // 2], 2),
            "p99": round(1e3 * sorted(gaps)[len(gaps) * 99 // 100], 2),
            "max": round(1e3 * max(gaps), 2),
        }
        for name, gaps in samples.items()
    }


def gaps_beside(rounds: int, num_tokens: int) -> dict[str, dict[str, float]]:
    """Returns percentiles of the milliseconds between two tokens of a stream, alone and beside a
    request with each grammar."""
    return asyncio.run(_measure(rounds, num_tokens))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="4096,128000")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="check only that it runs")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.sizes, args.tokens, args.rounds = "4096", 3, 1
    results: dict[str, object] = {}
    for size in map(int, args.sizes.split(",")):
        tokenizer = with_tokens(Tokenizer.load(default_model_path()), size)
        assert tokenizer.eos_token_id is not None
        compiler = GrammarCompiler(tokenizer, size, {tokenizer.eos_token_id})
        try:
            for name, took in compile_times(compiler).items():
                print(f"vocabulary {size:7}: compile {name:34} {took:9.3f} ms")
                results[f"{size} compile {name}"] = round(took, 3)
            for name, schema in {"person": PERSON, "long text": LONG_TEXT, "wide": WIDE}.items():
                times = sorted(mask_times(compiler, size, schema, args.tokens))
                p50, p99 = statistics.median(times), times[len(times) * 99 // 100]
                print(f"vocabulary {size:7}: mask of {name:10} {p50:7.1f} us median {p99:9.1f} p99")
                results[f"{size} mask {name}"] = [round(p50, 1), round(p99, 1)]
        finally:
            compiler.close()
    for name, took in step_times(args.rounds, 16 if args.smoke else 96).items():
        print(f"step of {ROWS} rows, {name:20} {took:7.3f} ms")
        results[f"step {name}"] = round(took, 3)
    gaps = gaps_beside(*((1, 8) if args.smoke else (5, 200)))
    for name, ms in gaps.items():
        print(f"a stream beside {name:24} " + ", ".join(f"{k} {v:.2f} ms" for k, v in ms.items()))
    results["gaps"] = gaps
    print(json.dumps(results))


if __name__ == "__main__":
    main()
