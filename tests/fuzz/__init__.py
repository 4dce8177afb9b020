"""Bytes from nowhere against everything that reads bytes. See targets.py; `make fuzz` runs them."""
