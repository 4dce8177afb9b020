"""Chats of ten turns with a model whose layers have states, beside llama.cpp's server.

    python -m bench.engine.turns --model random:lfm2-1.2b \\
        --peer-server llama-server --peer-model MODEL.gguf

Each turn's prompt is all of the chat so far and some new tokens. Measured are the tokens of it that
are computed, and the time to the first token, as a client sees both. Servers take turns chat by
chat. Kinds of chats:

    one chat     the prompt has every answer as it was given; also without the prefix cache
    two in turn  two such chats, each of whose turns follows one of the other
    cut answers  the prompt has the second half of each answer only, as where thoughts are left out

bench/peers/convert_llama_cpp.py makes the GGUF file from the checkpoint of --model.
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from bench.common import tables
from bench.common.checkpoints import model_directory
from bench.engine.turn_servers import Answer, Server, llama_cpp, mergestep
from serve.errors import ConfigError
from serve.machine import usable_processors
from serve.models import read_spec

_WARM_UP = 64  # tokens
_ROOM = 64  # tokens of the context beside a chat
OURS, OFF, PEER = "mergestep", "cache off", "llama.cpp"


class Shape(NamedTuple):
    """Sizes of a chat, in tokens. new: of each turn after the first one."""

    first: int = 1500
    new: int = 150
    answer: int = 50
    turns: int = 10

    @property
    def length(self) -> int:
        return self.first + (self.turns - 1) * self.new + self.turns * self.answer


class Kind(NamedTuple):
    """What chats there are at once, and what part of each answer the next prompt has."""

    chats: int = 1
    kept: float = 1.0


class Turn(NamedTuple):
    """A prompt's size, and medians over the chats. new: its tokens that no prompt and no answer
    had before."""

    prompt: int
    new: int
    computed: float
    first_s: float
    last_s: float


ONE_CHAT = "one chat"
KINDS = {ONE_CHAT: Kind(), "two in turn": Kind(chats=2), "cut answers": Kind(kept=0.5)}
Result = dict[str, list[Turn]]


def run_chats(
    server: Server, kind: Kind, shape: Shape, vocab: int, seed: int
) -> list[tuple[int, int, Answer]]:
    """Returns (tokens of the prompt, new ones among them, answer) of each turn, in order."""
    rng = random.Random(seed)
    texts: list[list[int]] = [[] for _ in range(kind.chats)]
    known, found = [0] * kind.chats, []
    for turn in range(shape.turns):
        for number, text in enumerate(texts):
            size = shape.new if turn else shape.first
            text += [rng.randrange(10, vocab - 10) for _ in range(size)]
            answer = server.ask(text, shape.answer)
            found.append((len(text), len(text) - known[number], answer))
            known[number] = len(text)
            kept = answer.token_ids[shape.answer - round(kind.kept * shape.answer) :]
            if len(kept) == shape.answer:
                known[number] += shape.answer
            text += kept
    return found


def measure(
    servers: Mapping[str, Server], kinds: Sequence[str], shape: Shape, vocab: int, repeats: int
) -> dict[str, Result]:
    """Returns the turns of each kind of chat and of each server."""
    for server in servers.values():
        server.ask(list(range(10, 10 + _WARM_UP)), shape.answer)
    results: dict[str, Result] = {}
    for position, (name, kind) in enumerate(KINDS.items()):
        if name not in kinds:
            continue
        names = [each for each in servers if each != OFF or name == ONE_CHAT]
        runs: dict[str, list[list[tuple[int, int, Answer]]]] = {each: [] for each in names}
        for repeat in range(repeats):
            seed = 1000 * position + repeat
            for each in names:
                runs[each].append(run_chats(servers[each], kind, shape, vocab, seed))
        results[name] = {each: _medians(found) for each, found in runs.items()}
    return results


def _medians(runs: list[list[tuple[int, int, Answer]]]) -> list[Turn]:
    turns = []
    for each in zip(*runs, strict=True):
        prompt, new, _ = each[0]
        answers = [answer for _, _, answer in each]
        turns.append(
            Turn(
                prompt,
                new,
                statistics.median(answer.computed for answer in answers),
                statistics.median(answer.first_s for answer in answers),
                statistics.median(answer.last_s for answer in answers),
            )
        )
    return turns


def turn_table(result: Result) -> Table:
    """Returns each turn's figures of each server."""
    table = Table("turn", "prompt", "new", title=ONE_CHAT, title_justify="left")
    for name in result:
        table.add_column(f"{name}: computed", justify="right")
        table.add_column("TTFT, ms", justify="right")
    for number, turns in enumerate(zip(*result.values(), strict=True), 1):
        cells = [str(number), f"{turns[0].prompt:,}", f"{turns[0].new:,}"]
        for turn in turns:
            cells += [f"{turn.computed:,.0f}", tables.number(1e3 * turn.first_s)]
        table.add_row(*cells)
    return table


def total_table(results: Mapping[str, Result], num_first: int) -> Table:
    """Returns sums over a kind's turns: of the tokens, of the times to the first token, of those of
    the turns after the first one, and of whole answers, each with its ratio to the first
    server's."""
    table = Table("chats", "server")
    columns = ("prompts", "new", "computed", "TTFT, s", "ratio", "later turns, s", "ratio")
    for column in (*columns, "answers, s", "ratio"):
        table.add_column(column, justify="right")
    for kind, result in results.items():
        base = _sums(next(iter(result.values())), KINDS[kind].chats)
        for name, turns in result.items():
            cells = [f"{sum(turn.prompt for turn in turns):,}"]
            cells.append(f"{sum(turn.new for turn in turns):,}")
            cells.append(f"{sum(turn.computed for turn in turns):,.0f}")
            for ours, seconds in zip(base, _sums(turns, KINDS[kind].chats), strict=True):
                cells += [tables.number(seconds), f"{seconds / ours:.2f}" if ours else ""]
            table.add_row(kind, name, *cells)
        table.add_section()
    table.caption = f"first turns have {num_first:,} tokens"
    return table


def _sums(turns: Sequence[Turn], chats: int) -> tuple[float, float, float]:
    """Returns the seconds to the first tokens, those of later turns, and those of all tokens."""
    return (
        sum(turn.first_s for turn in turns),
        sum(turn.first_s for turn in turns[chats:]),
        sum(turn.last_s for turn in turns),
    )


def turns(
    model: str,
    *,
    shape: Shape | None = None,
    kinds: Sequence[str] = tuple(KINDS),
    repeats: int = 3,
    options: Sequence[str] = (),
    peer: tuple[str, Path, Sequence[str]] | None = None,
    json_file: Path | None = None,
) -> dict[str, Result]:
    """Prints and returns the figures. options: more ones of `serve run`. peer: the program
    llama-server, its GGUF file and more of its options."""
    tables.check_file(json_file)
    shape = shape or Shape()
    path = model_directory(model)
    if path is None:
        raise ConfigError("--model must be a directory, random:SHAPE or a name")
    spec = read_spec(Path(path))
    if min(*shape, repeats) < 1 or shape.length + _ROOM > spec.max_model_len:
        raise ConfigError(
            f"chats of {shape.length} tokens do not fit a model of {spec.max_model_len}, or sizes"
            " are not positive"
        )
    threads, length = str(usable_processors()), shape.length + _ROOM
    shared = ["--dtype", "int8", "--compute-threads", threads, "--max-model-len", str(length)]
    shared += ["--speculation", "off", *options]
    head = tables.Head.now(f"turns of chats, {model}")
    with ExitStack() as stack:
        servers: dict[str, Server] = {OURS: stack.enter_context(mergestep(path, shared))}
        if peer is not None:
            program, file, more = peer
            given = ["-t", threads, "-tb", threads, "-c", str(8 * length), *more]
            servers[PEER] = stack.enter_context(llama_cpp(program, file, given))
        if ONE_CHAT in kinds:
            servers[OFF] = stack.enter_context(mergestep(path, [*shared, "--no-prefix-cache"]))
        results = measure(servers, kinds, shape, spec.vocab_size, repeats)
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    if ONE_CHAT in results:
        console.print(turn_table(results[ONE_CHAT]))
    console.print(total_table(results, shape.first))
    tables.write(json_file, head, _document(results))
    return results


def _document(results: Mapping[str, Result]) -> dict[str, Any]:
    return {
        kind: {name: [turn._asdict() for turn in found] for name, found in result.items()}
        for kind, result in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="random:lfm2-1.2b")
    for name, size in Shape._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--kind", action="append", choices=KINDS, help="by default each")
    parser.add_argument("--repeats", type=int, default=3, help="chats of each kind")
    parser.add_argument("--options", default="", help="more options of serve run")
    parser.add_argument("--peer-server", default="llama-server", help="the program llama-server")
    parser.add_argument("--peer-model", type=Path, help="its GGUF file; without it, no peer")
    parser.add_argument("--peer-options", default="", help="more options of llama-server")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--quick", action="store_true", help="a tiny model, as a smoke test")
    args = parser.parse_args()
    shape = Shape(args.first, args.new, args.answer, args.turns)
    peer = None
    if args.peer_model is not None:
        peer = (args.peer_server, args.peer_model, shlex.split(args.peer_options))
    if args.quick:
        args.model, shape, args.repeats = "random:tiny-convolutions", Shape(1100, 60, 10, 4), 1
    turns(
        args.model,
        shape=shape,
        kinds=args.kind or tuple(KINDS),
        repeats=args.repeats,
        options=shlex.split(args.options),
        peer=peer,
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
