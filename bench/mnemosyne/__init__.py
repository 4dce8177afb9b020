"""The published figures of Mnemosyne beside what the cost of a grid predicts (bench/plan/grid.py),
and measured stages beside what the simulator predicts: `python -m bench.mnemosyne`."""
