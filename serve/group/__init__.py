"""This package runs one model as a group of processes, each with a part of the weights."""
