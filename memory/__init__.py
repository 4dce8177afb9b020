"""Stores K and V, and runs attention on the machines that store them."""
