"""What grammars of strangers cost others: the time between two tokens of somebody else's stream,
alone and beside a request of 128 sequences whose grammar is simple, or made to be slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

from serve import SamplingParams
from serve.config import default_model_path
from serve.engine.engine import Engine
from serve.errors import RequestError
from serve.structured_output import StructuredOutput

N = 128
PROMPT = [5, 6, 7, 8]


def grammars() -> dict[str, StructuredOutput | None]:
    """None: no grammar. Two that are simple, three that branch and branch again."""
    many = range(400)
    rules = (f"t{i}: /[a-z]{{1,{i % 40 + 1}}}/ t{i * 7 % 400}?" for i in many)
    lark = "start: " + " | ".join(f"t{i}" for i in many) + "\n" + "\n".join(rules)
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


async def _other(engine: Engine, structured: StructuredOutput | None, num_tokens: int) -> None:
    params = SamplingParams(
        n=N, max_tokens=num_tokens, seed=1, structured=structured, ignore_eos=structured is None
    )
    # too complex for its text, as it may be
    with contextlib.suppress(RequestError):
        await engine.generate(PROMPT, params)


async def _gaps(engine: Engine, num_tokens: int) -> list[float]:
    """Seconds."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    gaps: list[float] = []
    last_s: float | None = None
    async for _ in engine.stream(PROMPT, params):
        now_s = time.perf_counter()
        if last_s is not None:
            gaps.append(now_s - last_s)
        last_s = now_s
    return gaps


async def _measure(rounds: int, num_tokens: int) -> dict[str, dict[str, float]]:
    """Milliseconds, over all rounds; the cases take turns."""
    cases = grammars()
    found: dict[str, list[float]] = {name: [] for name in ("alone", *cases)}
    async with Engine(str(default_model_path()), max_num_seqs=N + 2) as engine:
        for number in range(rounds + 1):
            gaps = {"alone": await _gaps(engine, num_tokens)}
            for name, structured in cases.items():
                other = asyncio.create_task(_other(engine, structured, num_tokens // 2))
                await asyncio.sleep(0.02)
                gaps[name] = await _gaps(engine, num_tokens)
                await other
            for name, seconds in gaps.items():
                found[name] += seconds if number else []  # the first round compiles
    return {
        name: {
            "p50": round(1e3 * sorted(gaps)[len(gaps) // 2], 2),
            "p99": round(1e3 * sorted(gaps)[len(gaps) * 99 // 100], 2),
            "max": round(1e3 * max(gaps), 2),
        }
        for name, gaps in found.items()
    }


def gaps_beside(rounds: int, num_tokens: int) -> dict[str, dict[str, float]]:
    """Milliseconds between two tokens of a stream, beside each of the requests."""
    return asyncio.run(_measure(rounds, num_tokens))
