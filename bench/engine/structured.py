"""What structured output costs: `python -m bench.engine.structured`.

Compiling a grammar (in the child process and again in the server; known already), the mask of one
token, and a decode step of 16 masked rows beside one of 16 that are free, by turns in one run;
then what others notice of grammars made to be slow (bench/engine/structured_hostile.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence

from bench.engine.structured_hostile import gaps_beside
from serve import LLM, SamplingParams
from serve.config import default_model_path
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


def with_tokens(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """A vocabulary of that size: its own tokens, and pairs of them."""
    assert tokenizer.pieces is not None
    own = list(tokenizer.pieces)
    known = set(own)
    pairs = (a + b for a, b in itertools.product(own[-600:], own[300:900]))
    more = (piece for piece in pairs if piece not in known)
    tokenizer.pieces = own + list(itertools.islice(more, size - len(own)))
    return tokenizer


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def compile_times(compiler: GrammarCompiler) -> dict[str, float]:
    """Milliseconds."""
    schemas = [StructuredOutput("json_schema", json.dumps(each)) for each in (PERSON, WIDE)]
    times = {"first of all (starts the child)": seconds(lambda: compiler.compile(schemas[0]))}
    for i in range(9):
        fresh = StructuredOutput("json_schema", json.dumps({**PERSON, "title": str(i)}))
        times[f"new {i}"] = seconds(lambda each=fresh: compiler.compile(each))  # type: ignore[misc]
    new = statistics.median([t for name, t in times.items() if name.startswith("new")])
    known = [seconds(lambda: compiler.compile(schemas[0])) for _ in range(99)]
    return {
        "first of all (starts the child)": times["first of all (starts the child)"] * 1e3,
        "a new schema": new * 1e3,
        "a new one of 100 fields": seconds(lambda: compiler.compile(schemas[1])) * 1e3,
        "a known one": statistics.median(known) * 1e3,
    }


def mask_times(
    compiler: GrammarCompiler, vocab_size: int, schema: object, count: int
) -> list[float]:
    """Microseconds for each of many tokens: taking in the one before, and the bits of the next."""
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
    """Milliseconds of a step of ROWS rows, medians of rounds by turns."""
    masked = StructuredOutput("json_schema", json.dumps(LONG_TEXT))
    settings = {"max_tokens": num_tokens, "ignore_eos": True, "seed": 1}
    ways = {
        "free": SamplingParams(**settings),  # type: ignore[arg-type]
        "masked": SamplingParams(**settings, structured=masked),  # type: ignore[arg-type]
        "one of them masked": None,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    prompts = [[5 + i] * 8 for i in range(ROWS)]
    with LLM(str(default_model_path()), max_num_seqs=ROWS, prefix_cache=False) as llm:
        for number in range(rounds + 1):
            for name, params in ways.items():
                each = [params or ways["masked" if i == 0 else "free"] for i in range(ROWS)]
                took = seconds(lambda: llm.generate(prompts, each, use_tqdm=False))  # type: ignore[arg-type]  # noqa: B023
                if number:  # the first compiles
                    times[name].append(took / num_tokens * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="4096,128000")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="see only that it runs")
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
