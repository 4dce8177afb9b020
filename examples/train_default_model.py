"""Trains the built-in model: python -m examples.train_default_model --out DIR.

--seed determines the training text and the weights; the tokenizer is always the same. The number of
steps is fixed and does not depend on time. At the end the program writes an evaluation, eval.json,
beside the weights.

With --start a trained model is trained on, with ReLU in its MLPs (--activation relu) or as a
mixture (--experts); docs/weights-beyond-memory.md has what such models are measured for.
"""

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from examples.default_model.convert import as_mixture, read_model
from examples.default_model.corpus import heldout_text
from examples.default_model.data import Batch, Encoder, make_batch, train_tokenizer
from examples.default_model.evaluate import evaluate, perplexity, table
from examples.default_model.export import read_weights, write_model
from examples.default_model.model import ACTIVATIONS, Llama, Shape
from examples.default_model.muon import make_optimizers, schedule


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes of a training run, whose last long_steps steps train on long chats."""

    shape: Shape = field(default_factory=Shape)
    tokenizer_dialogs: int = 60_000
    steps: int = 9000
    long_steps: int = 642  # part of `steps`
    rows: int = 8
    length: int = 256
    long_rows: int = 2
    long_length: int = 1024
    eval_dialogs: int = 600
    rate: float = 1.0  # times the learning rates
    sparse: float = 0.0  # the weight of the activations' size in the loss


SMOKE = Plan(
    shape=Shape(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2),
    tokenizer_dialogs=200,
    steps=4,
    long_steps=1,
    rows=2,
    long_rows=1,
    long_length=512,
    eval_dialogs=2,
)


def batch_of(plan: Plan, encoder: Encoder, seed: int, step: int) -> Batch:
    if step < plan.steps - plan.long_steps:
        return make_batch(encoder, seed, step, plan.rows, plan.length, chats=0)
    return make_batch(
        encoder, seed, step, plan.long_rows, plan.long_length, chats=(plan.long_rows + 1) // 2
    )


def fit(
    plan: Plan, model: Llama, encoder: Encoder, seed: int, device: str, checkpoint: Path | None
) -> float:
    """Trains the model and returns the seconds that this took, including those before a resume."""
    optimizers = make_optimizers(model)
    base_lrs = [[g["lr"] for g in o.param_groups] for o in optimizers]
    first, before_s, started = 0, 0.0, time.monotonic()
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first, before_s = state["step"], state["seconds"]
    bar = tqdm(range(first, plan.steps), initial=first, total=plan.steps, mininterval=5.0)
    smooth = 0.0
    for step in bar:
        scale = plan.rate * schedule(step, plan.steps)
        for optimizer, lrs in zip(optimizers, base_lrs, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * scale
        batch = Batch(*(t.to(device) for t in batch_of(plan, encoder, seed, step)))
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model.loss(*batch, sparse=plan.sparse)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if step == first else 0.98 * smooth + 0.02 * loss.item()
        bar.set_postfix_str(f"loss {smooth:.4f}", refresh=False)
        if checkpoint is not None and (step + 1) % 250 == 0:
            state = {"model": model.state_dict(), "step": step + 1}
            state["optimizers"] = [o.state_dict() for o in optimizers]
            state["seconds"] = before_s + time.monotonic() - started
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    return before_s + time.monotonic() - started


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_default_model", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="the number of steps")
    parser.add_argument("--checkpoint", type=Path, help="file to resume from")
    parser.add_argument("--start", type=Path, help="folder of a trained model that is trained on")
    parser.add_argument("--rate", type=float, default=1.0, help="times the learning rates")
    parser.add_argument("--activation", choices=list(ACTIVATIONS), help="default: of --start")
    parser.add_argument("--sparse", type=float, default=0.0, help="weight of the L1 of activations")
    parser.add_argument("--experts", type=int, default=0, help="slices of MLPs, with --start")
    parser.add_argument("--top-k", type=int, default=4, help="experts of a token")
    parser.add_argument("--eval-dialogs", type=int, help="the number of dialogs that are judged")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
    args = parser.parse_args()
    if args.top_k < 1:
        parser.error("--top-k: at least 1")
    if args.experts and (args.start is None or args.experts % args.top_k):
        parser.error("--experts: --start is needed, and a multiple of --top-k")
    return args


def plan_of(args: argparse.Namespace) -> Plan:
    plan = SMOKE if args.smoke else Plan()
    if args.steps is not None:
        plan = replace(Plan(), steps=args.steps, long_steps=args.steps // 14)
    shape = replace(plan.shape, hidden_act=args.activation or plan.shape.hidden_act)
    dialogs = args.eval_dialogs or plan.eval_dialogs
    return replace(plan, shape=shape, rate=args.rate, sparse=args.sparse, eval_dialogs=dialogs)


def beginning(args: argparse.Namespace, plan: Plan) -> tuple[Llama, Tokenizer]:
    """Returns the model before the training, and its tokenizer. SystemExit names an option that the
    model of --start does not allow."""
    if args.start is None:
        model = Llama(plan.shape)
        model.init_weights()
        return model, train_tokenizer(plan.shape.vocab_size, plan.tokenizer_dialogs)
    model = read_model(args.start, args.activation)
    if args.experts:
        size = model.shape.intermediate_size
        if model.shape.num_local_experts:
            raise SystemExit("--experts: --start is a mixture already")
        if size % args.top_k:
            raise SystemExit(
                f"--top-k: {args.top_k} does not divide the intermediate_size {size} of --start"
            )
        model = as_mixture(model, args.experts, args.top_k)
    if args.sparse and model.shape.num_local_experts:
        raise SystemExit("--sparse: activations of experts have no part in the loss")
    return model, Tokenizer.from_file(str(args.start / "tokenizer.json"))


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True, warn_only=args.device != "cpu")
    plan = plan_of(args)
    model, tokenizer = beginning(args, plan)
    encoder = Encoder(tokenizer)
    model.to(args.device)
    text = heldout_text(0, 80_000 if not args.smoke else 500)
    before = None if args.start is None else perplexity(model, encoder, text)
    num_params = sum(p.numel() for p in model.parameters())
    print(f"{num_params:,} parameters, vocabulary {tokenizer.get_vocab_size()}, {args.device}")
    cpu_started = time.process_time()
    minutes = fit(plan, model, encoder, args.seed, args.device, args.checkpoint) / 60
    cpu_minutes = (time.process_time() - cpu_started) / 60
    write_model(args.out, model, tokenizer)
    read_weights(args.out, model)
    result, wrong = evaluate(model, encoder, plan.eval_dialogs)
    if before is not None:
        result["heldout_before"] = before
    result["heldout"] = perplexity(model, encoder, text)
    result["training"] = {
        "seed": args.seed,
        "steps": plan.steps,
        "options": {
            name: getattr(args, name)
            for name in ("activation", "sparse", "rate", "experts", "top_k")
        },
        "parameters": num_params,
        "minutes": round(minutes, 1),
        "cpu_minutes": round(cpu_minutes, 1),  # CPU time of all threads since the last resume
        "threads": args.threads,
        "device": args.device,
        "torch": torch.__version__,
    }
    (args.out / "eval.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print("\n".join(wrong))
    print(table(result))
    print(f"trained in {minutes:.1f} min, held-out perplexity {result['heldout']['perplexity']}")


if __name__ == "__main__":
    main()
