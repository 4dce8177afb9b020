"""Prints dialogs of a seed, or writes the held-out text: python -m bench.corpus --help."""

import argparse
from itertools import islice
from pathlib import Path

from bench.corpus import dialogs, heldout_text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.corpus", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=10, help="how many dialogs to print")
    parser.add_argument("--heldout", type=Path, help="write the held-out text to this file")
    args = parser.parse_args()
    if args.heldout is not None:
        args.heldout.write_text(heldout_text(args.seed), encoding="utf-8")
        return
    for dialog in islice(dialogs(args.seed), args.show):
        for message in dialog:
            print(f"{message['role']:>9}: {message['content']}")
        print()


if __name__ == "__main__":
    main()
