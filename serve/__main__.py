"""`python -m serve`: the same as the `serve` command."""

from serve.cli.main import main

if __name__ == "__main__":
    main()
