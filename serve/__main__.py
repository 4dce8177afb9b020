"""Runs the `serve` command (`python -m serve`)."""

from serve.cli.main import main

if __name__ == "__main__":
    main()
