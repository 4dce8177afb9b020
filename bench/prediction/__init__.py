"""Measures what predicted lengths are worth: their errors, orders by them, admission by them."""
