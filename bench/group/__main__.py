"""`python -m bench.group`: the speed of groups (speed.py)."""

from bench.group.speed import main

main()
