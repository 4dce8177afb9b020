"""Measurements: load tests of a server or an engine, operator benches, and their texts."""
