"""Exchanges: how the tensor ranks of a stage give one another their columns of each product."""
