"""What attention on memory devices may be worth per dollar: `python -m bench.nodes.node_cost`.

This is a model (bench/plan), not a measurement. It takes the peaks of data sheets, and Lamina's
models, traces, prices and network. Only decoding counts, as in Lamina's evaluation; prompts are
computed elsewhere. A device reaches 80 % of its bandwidth and 60 % of its arithmetic, and has 90 %
of its memory for weights and K/V. The lengths are those of bench/load/workload/published.py.

With n devices of one kind in tensor parallel, a batch of B sequences with contexts of l tokens
takes

    products   max(weights / (n bandwidth), 2 N B / (n arithmetic)) + 2 all-reduces a layer
    attention  max(B l kv / (n bandwidth), 4 B l d L / (n arithmetic))
    step       products + attention

A pair (a, b) has r replicas of the weights on a H100s, K/V on b memory devices, and n batches of
B / n sequences in flight. A token sends (2 + 2/G) e d bytes a layer, and each layer has a round
trip. With the times of one of these batches, every batch has made a step after

    max(products + attention + network, n attention, n products / r, n wire)

and n is the best of 1 .. r + 1. The model leaves out what sending q early hides (3 to 13 % in the
paper).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.load.workload.published import (
    AZURE_CODE,
    AZURE_CONV,
    KIMI_CONV,
    KIMI_TA,
    Published,
    published_calls,
)
from bench.load.workload.work import fit_context
from bench.plan.cost import Machine, MachineCost
from bench.plan.disaggregated import Figures, Split, best, homogeneous
from bench.plan.efficiency import Efficiency
from bench.plan.hardware import Device, Link, load_devices
from bench.plan.shapes import Precision, Shape

MAX_MODEL_LEN = 131_072
MAX_DEVICES = 8
MAX_COMPUTE, MAX_MEMORY = 4, 8
MEMORY_FORMAT = "NAME:TB/s:TFLOP/s:GB:DOLLARS"
COLUMNS = ("what", "batch", "tokens/s", "ms between", "M tokens/$")
PRECISIONS = {1: Precision(kv="int8"), 2: Precision()}  # by the bytes of a K/V number
# The shares of the peaks that devices reach; there are no other overheads.
PAPER = Efficiency(weights=0.8, kv=0.8, products=((1, 0.6),), decode=0.6, memory=0.9)
NETWORK = Link(50e9, 33e-6)  # 400 Gbit/s, and the round trip of Lamina's host-bypassed network
H100 = replace(load_devices()["h100-sxm"], name="H100", dollars_per_h=11.06)
H20 = replace(load_devices()["h20"], name="H20", dollars_per_h=4.63)
TRACES = {
    "Azure-Conv": AZURE_CONV,
    "Azure-Code": AZURE_CODE,
    "Kimi-Conv": KIMI_CONV,
    "Kimi-TA": KIMI_TA,
}


def published(name: str, weight_bytes: float, layers: int, hidden: int, group: int) -> Shape:
    """Returns a model whose weights are bf16 and all in the layers. group: the query heads of a
    K/V head."""
    return Shape(
        name=name,
        hidden=hidden,
        q_width=hidden,
        kv_width=hidden // group,
        head_dim=128,
        ffn=0,
        windows=(None,) * layers,
        max_model_len=MAX_MODEL_LEN,
        block_parameters=int(weight_bytes / 2),
    )


MODELS = (
    published("LLaMA-33B", 64.7e9, 60, 6656, 1),
    published("LLaMA-65B", 130.1e9, 80, 8192, 1),
    published("LLaMA3-70B", 137.5e9, 80, 8192, 8),
)
# Lamina's (a, b), and the number of H100s with which it was compared
LAMINA = {"LLaMA-33B": (1, 2, 2), "LLaMA-65B": (2, 4, 4), "LLaMA3-70B": (2, 4, 4)}


def mean_context(trace: Published) -> float:
    """Returns the mean context of sequences in flight, in which a request counts once for each
    token that it generates."""
    calls = fit_context(published_calls(trace, trace.num_requests, 0), MAX_MODEL_LEN, [])
    lengths = [(call.num_prompt, call.num_output or 0) for call in calls]
    tokens = sum(output * (prompt + (output - 1) / 2) for prompt, output in lengths)
    return tokens / sum(output for _, output in lengths)


def ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under is not None else None


@dataclass(frozen=True, slots=True)
class Case:
    """The figures of a model on a trace: of Lamina's configuration, of the H100s with which it was
    compared (beside), and the best per dollar of each kind. None: it does not fit."""

    model: str
    trace: str
    context: float
    lamina: Figures | None
    beside: Figures | None
    best: dict[str, Figures | None]

    def as_json(self) -> dict[str, Any]:
        lamina, beside = _json(self.lamina), _json(self.beside)
        return {
            "model": self.model,
            "trace": self.trace,
            "context": self.context,
            "lamina": lamina,
            "beside": beside,
            "ratios": {
                key: ratio(lamina.get(key), beside.get(key))
                for key in ("batch", "tokens_per_s", "tokens_per_dollar")
            },
            "best": {kind: _json(figures) for kind, figures in self.best.items()},
        }


def _json(figures: Figures | None) -> dict[str, Any]:
    return {} if figures is None else figures.as_json()


def compare(
    model: Shape,
    trace: str,
    context: float,
    memory: Device,
    precision: Precision = PRECISIONS[2],
) -> Case:
    a, b, num_devices = LAMINA[model.name]
    split = Split(model, precision, H100, memory, (PAPER, PAPER))

    def of_one_kind(device: Device, number: int) -> Figures | None:
        cost = MachineCost(model, precision, Machine(device, number), PAPER)
        return homogeneous(cost, context)

    pairs = [(a, b) for a in range(1, MAX_COMPUTE + 1) for b in range(1, MAX_MEMORY + 1)]
    alone = {
        f"{device.name} alone": best(of_one_kind(device, n) for n in range(1, MAX_DEVICES + 1))
        for device in (H100, memory)
    }
    return Case(
        model.name,
        trace,
        context,
        split.figures(context, a, b),
        of_one_kind(H100, num_devices),
        {"(a, b)": best(split.figures(context, *pair) for pair in pairs)} | alone,
    )


def _cells(figures: Figures | None) -> list[str]:
    if figures is None:
        return ["does not fit", *[""] * 4]
    return [
        f"{figures.name} x{figures.in_flight}" if figures.in_flight > 1 else figures.name,
        f"{figures.batch:,.0f}",
        f"{figures.tokens_per_s:,.0f}",
        f"{1e3 * figures.step_s:.0f}",
        f"{(figures.tokens_per_dollar or 0.0) / 1e6:.2f}",
    ]


def _lamina_table(cases: list[Case], memory: Device) -> Table:
    table = Table(
        *("model", "trace", "context", *COLUMNS, "GB/s"),
        title=f"(H100, {memory.name}) beside H100 alone at about its price: a model",
        caption="Lamina measured +16.1 to +90.1 % tokens/s at about equal cost, batch x2.39.\n"
        "x2: batches in flight. GB/s: rate of all links with which one batch is a fifth slower.",
    )
    for case in cases:
        table.add_row(case.model, case.trace, f"{case.context:,.0f}", *_cells(case.beside))
        required = case.lamina and case.lamina.required_bytes_per_s
        rate = f"{required / 1e9:.0f}" if required else ""
        table.add_row("", "", "", *_cells(case.lamina), rate)
        ratios = [
            "" if value is None else f"{value:.2f}x" for value in case.as_json()["ratios"].values()
        ]
        table.add_row(*("", "", "", "", *ratios[:2], "", *ratios[2:]), end_section=True)
    return table


def _best_table(cases: list[Case]) -> Table:
    limits = f"a <= {MAX_COMPUTE}, b <= {MAX_MEMORY}, or up to {MAX_DEVICES} of one kind"
    table = Table("model", "trace", *COLUMNS, title=f"The most tokens per dollar: {limits}")
    for case in cases:
        head = (case.model, case.trace)
        for figures in case.best.values():
            table.add_row(*head, *_cells(figures))
            head = ("", "")
        table.add_section()
    return table


def report(cases: list[Case], memory: Device) -> None:
    console = Console()
    console.width = max(console.width, 100)
    console.print(_lamina_table(cases, memory))
    console.print(_best_table(cases))


def memory_device(text: str) -> Device:
    """Returns the device of a text NAME:TB/s:TFLOP/s:GB:DOLLARS, whose peers are on the network.
    Raises argparse.ArgumentTypeError."""
    name, *numbers = text.split(":")
    try:
        bandwidth, flops, size, dollars = (float(number) for number in numbers)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {MEMORY_FORMAT}") from None
    if (
        not name
        or name == H100.name
        or not all(0 < number < math.inf for number in (bandwidth, flops, size, dollars))
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} needs a name other than {H100.name} and numbers above 0: {MEMORY_FORMAT}"
        )
    return Device(
        name=name,
        kind="gpu",
        memory_bytes=1e9 * size,
        bytes_per_s=1e12 * bandwidth,
        operations={"bf16": 1e12 * flops},
        peers=NETWORK,
        network=NETWORK,
        dollars_per_h=dollars,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nodes.node_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--memory",
        type=memory_device,
        default=H20,
        metavar="DEVICE",
        help=f"device in place of the H20, as {MEMORY_FORMAT} (dollars an hour)",
    )
    parser.add_argument(
        "--kv-bytes", type=int, choices=(1, 2), default=2, help="bytes of a K/V number; 1 is int8"
    )
    args = parser.parse_args()
    contexts = {name: mean_context(trace) for name, trace in TRACES.items()}
    cases = [
        compare(model, trace, context, args.memory, PRECISIONS[args.kv_bytes])
        for model in MODELS
        for trace, context in contexts.items()
    ]
    report(cases, args.memory)
    assumptions = {
        "bandwidth_share": PAPER.weights,
        "arithmetic_share": PAPER.decode,
        "memory_share": PAPER.memory,
        "devices": [asdict(H100), asdict(args.memory)],
        "network": asdict(NETWORK),
        "kv_bytes": args.kv_bytes,
    }
    print(json.dumps({"assumptions": assumptions, "cases": [case.as_json() for case in cases]}))


if __name__ == "__main__":
    main()
