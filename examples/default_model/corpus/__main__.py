"""Prints dialogs of a seed, or writes them, the held-out text or the requests of `serve bench`."""

import argparse
from itertools import islice
from pathlib import Path

from examples.default_model.corpus import dialogs, frozen_requests, heldout_text, render


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.default_model.corpus", description=__doc__
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=10, help="how many dialogs to print or write")
    parser.add_argument("--training", type=Path, help="write them as training reads them")
    parser.add_argument("--heldout", type=Path, help="write the held-out text to this file")
    parser.add_argument("--requests", type=Path, help="write bench/data/mixed.jsonl to this file")
    args = parser.parse_args()
    if args.heldout is not None:
        args.heldout.write_text(heldout_text(args.seed), encoding="utf-8")
    if args.requests is not None:
        args.requests.write_text(frozen_requests(), encoding="utf-8")
    shown = islice(dialogs(args.seed), args.show)
    if args.training is not None:
        args.training.write_text("".join(map(render, shown)), encoding="utf-8")
    if args.heldout is not None or args.requests is not None or args.training is not None:
        return
    for dialog in shown:
        for message in dialog:
            print(f"{message['role']:>9}: {message['content']}")
        print()


if __name__ == "__main__":
    main()
